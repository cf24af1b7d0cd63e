"""What is tuned: of a text, tensors, modules, a model's config and its files."""

import json
import struct
import sys

import pytest
import torch
from torch import nn

import isogemm
from isogemm.tuning.weights import Weight, from_config, from_safetensors, from_text, from_torch, listed

LINEAR, GRADIENTS = ("linear",), ("dx", "dw")
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "vocab_size": 1000,
    "num_attention_heads": 4, "num_key_value_heads": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100}
VIT = {
    "model_type": "vit", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 128,
}  # fmt: skip


def sizes(found):
    return [(each.n, each.k) for each in found]


def kinds(found):
    return [(each.n, each.k, each.forward, each.backward) for each in found]


def test_a_text():
    assert from_text("4096x14336, 8 x 16") == [Weight(4096, 14336, torch.bfloat16), Weight(8, 16, torch.bfloat16)]


@pytest.mark.parametrize("text", ["", "4096", "4x", "4x5x6", "4x5,", "0x8", "-4x8", "axb", "4.0x8"])
def test_a_text_without_sizes(text):
    with pytest.raises(ValueError, match=r"weights is .*; expected sizes N x K such as 4096x14336"):
        from_text(text)


def test_shapes_are_listed_once_with_all_that_runs():
    mlp = isogemm.nn.MLP(16, 32, activation="gelu", dtype=torch.bfloat16)
    found = listed([*from_text("32x16,32x16"), *from_torch(mlp)], None, None)
    assert kinds(found) == [(32, 16, ("linear", "activated"), ("dx", "dw")), (16, 32, ("linear",), ("gradient", "dw"))]


@pytest.mark.parametrize(
    ("dtype", "precision", "number"),
    [
        (torch.bfloat16, None, "half"),
        (torch.float16, "tf32", "half"),
        (torch.float32, "ieee", "ieee"),
        (torch.float32, "tf32", "tf32"),
        (torch.float32, "tf32x3", "tf32x3"),
        (torch.float32, None, "ieee"),
    ],
)
def test_the_arithmetic(dtype, precision, number, monkeypatch):
    monkeypatch.setattr("isogemm.tuning.weights.matmul_precision", lambda: "ieee")
    (found,) = listed(from_torch(torch.empty(8, 16, dtype=dtype)), None, precision)
    assert found.number == number


def test_torch_s_precision_is_the_default(monkeypatch):
    monkeypatch.setattr("isogemm.tuning.weights.matmul_precision", lambda: "tf32")
    assert listed(from_torch(torch.empty(8, 16)), None, None)[0].number == "tf32"


@pytest.mark.parametrize("asked", [None, "ieee"])
@pytest.mark.parametrize(
    "module",
    [
        isogemm.nn.Linear(8, 16, precision="tf32x3"),
        isogemm.nn.MLP(8, 16, activation="swiglu", precision="tf32x3"),
        isogemm.nn.MLP(8, 16, activation="gelu", precision="tf32x3"),
    ],
)
def test_a_module_s_own_precision_is_what_it_runs(module, asked):
    assert {each.number for each in listed(from_torch(module), None, asked)} == {"tf32x3"}
    assert {each.number for each in listed(from_torch(module), torch.bfloat16, asked)} == {"half"}


def test_another_dtype_than_the_weights_own():
    (found,) = listed(from_torch(torch.empty(8, 16, dtype=torch.float64)), torch.bfloat16, None)
    assert found.number == "half"


def test_packed_weights_have_other_sizes():
    packed = nn.Linear(8, 16)
    packed.weight = nn.Parameter(torch.zeros(64, 1, dtype=torch.uint8), requires_grad=False)  # as of bitsandbytes
    found = listed(from_torch(nn.Sequential(packed, nn.Linear(4, 4))), torch.bfloat16, None)
    assert sizes(found) == [(4, 4)]


def test_layers_without_a_matrix():
    assert list(from_torch(nn.Linear(8, 0))) == []
    flat = nn.Linear(8, 16)
    flat.weight = nn.Parameter(torch.zeros(128))
    with pytest.raises(ValueError, match=r"a Linear has a weight \[128\]; expected \[N, K\], as before it is sharded"):
        from_torch(flat)


def test_weights_that_are_torch_s():
    served = nn.Linear(4, 5)
    model = nn.Sequential(served, nn.Linear(6, 7, dtype=torch.float64))
    assert sizes(listed(from_torch(model), None, None)) == [(5, 4)]
    with pytest.raises(ValueError, match=r"weights: found no linear layer in torch\.float32, "):
        listed(from_torch(model[1]), None, None)


@pytest.mark.parametrize(
    ("dtype", "precision", "words"),
    [(torch.int8, None, r"dtype is torch\.int8; accepted: torch\.float32"), (None, "fast", "precision is 'fast'; acc")],
)
def test_other_options(dtype, precision, words):
    with pytest.raises(ValueError, match=words):
        listed(from_text("8x8"), dtype, precision)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (3, "weights is a int; expected a module"),
        ([torch.zeros(3)], r"weights: got a tensor \[3\]; expected a module, \[N, K\] tensors"),
        (torch.zeros(0, 3), r"got a tensor \[0, 3\]"),
        (["8x8"], "weights: got a str"),
    ],
)
def test_what_has_no_weights(given, words):
    with pytest.raises(ValueError, match=words):
        from_torch(given)


def test_tensors():
    assert sizes(from_torch(torch.zeros(3, 4))) == [(3, 4)]
    assert sizes(from_torch(iter([torch.zeros(3, 4), torch.zeros(5, 6, device="meta")]))) == [(3, 4), (5, 6)]


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Linear(8, 16), [(16, 8, LINEAR, GRADIENTS)]),
        (isogemm.nn.Linear(8, 16), [(16, 8, LINEAR, GRADIENTS)]),
        (isogemm.nn.Linear(8, 16, activation="relu"), [(16, 8, ("activated",), GRADIENTS)]),
        (
            isogemm.nn.MLP(8, 32, 16, activation="gelu"),
            [(32, 8, ("activated",), GRADIENTS), (16, 32, LINEAR, ("gradient", "dw"))],
        ),
        (
            isogemm.nn.MLP(8, 32, 16, activation="swiglu"),
            [(32, 8, ("gated",), GRADIENTS), (16, 32, LINEAR, ("gated gradient", "dw"))],
        ),
        (nn.Sequential(nn.ReLU(), nn.LayerNorm(3)), []),
    ],
)
def test_modules_are_tuned_for_what_they_run(module, expected):
    assert kinds(from_torch(module)) == expected
    assert kinds(from_torch(nn.ModuleList([nn.Sequential(module)]))) == expected


def test_a_swapped_model():
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    isogemm.nn.swap(model)
    assert kinds(from_torch(model)) == [(16, 8, ("activated",), GRADIENTS), (4, 16, LINEAR, GRADIENTS)]


@pytest.fixture
def config(tmp_path):
    """config(content): the path of a config.json."""

    def write(content):
        (tmp_path / "config.json").write_text(json.dumps(content))
        return tmp_path / "config.json"

    return write


def test_a_llama_s_config(config):
    pytest.importorskip("transformers")
    file = config(LLAMA)
    block = [(64, 64), (32, 64), (32, 64), (64, 64), (176, 64), (176, 64), (64, 176)]
    found = from_config(file)
    assert sizes(found) == [*block, *block, (1000, 64)]
    assert {(each.dtype, each.forward, each.backward) for each in found} == {(torch.bfloat16, LINEAR, GRADIENTS)}
    assert from_config(file.parent) == found
    assert sizes(listed(found, None, None)) == [(64, 64), (32, 64), (176, 64), (64, 176), (1000, 64)]


def test_a_gpt2_s_config(config):
    """Its layers are x @ W: forward as the gradient of a Linear's x, and back again."""
    pytest.importorskip("transformers")
    found = listed(from_config(config(GPT2)), None, "ieee")
    transposed = [(n, k, ("dx",), ("linear", "dw")) for n, k in ((32, 96), (32, 32), (32, 128), (128, 32))]
    assert kinds(found) == [*transposed, (100, 32, LINEAR, GRADIENTS)]
    assert found[0].number == "ieee"


def test_a_model_that_is_no_causal_lm(config):
    pytest.importorskip("transformers")
    assert {(64, 64), (128, 64), (64, 128)} <= set(sizes(from_config(config(VIT))))


SMALL = {
    "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "vocab_size": 1000,
}  # fmt: skip
SEEING = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
PLAIN = {(64, 64), (32, 64), (176, 64), (64, 176), (1000, 64)}
FAMILIES = {  # model_type: the class its config names, what differs from SMALL, and shapes that must be found
    "llama": ("LlamaForCausalLM", {}, PLAIN),
    "qwen2": ("Qwen2ForCausalLM", {}, PLAIN),
    "qwen3": ("Qwen3ForCausalLM", {}, PLAIN),
    "gemma2": ("Gemma2ForCausalLM", {}, PLAIN),
    "gemma3_text": ("Gemma3ForCausalLM", {}, PLAIN),
    "mistral": ("MistralForCausalLM", {}, PLAIN),
    "phi3": ("Phi3ForCausalLM", {"pad_token_id": 0}, {(128, 64), (64, 64), (352, 64), (64, 176), (1000, 64)}),  # packed
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 2}, {(64, 64), (32, 64), (1000, 64)}),
    "gemma3": (
        "Gemma3ForConditionalGeneration", {"text_config": SMALL, "vision_config": SEEING}, {*PLAIN, (48, 32), (32, 48)},
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        {
            "text_config": {"model_type": "llama", **SMALL},
            "vision_config": {"model_type": "clip_vision_model", **SEEING},
        },
        {*PLAIN, (48, 32), (32, 48), (64, 32)},
    ),
    "mllama": (
        "MllamaForConditionalGeneration",
        {
            "text_config": {
                "model_type": "mllama_text_model", **SMALL, "cross_attention_layers": [0], "pad_token_id": 0,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            },
            "vision_config": {
                "model_type": "mllama_vision_model", "hidden_size": 32, "intermediate_size": 48, "attention_heads": 2,
                "num_hidden_layers": 1, "num_global_layers": 1, "intermediate_layers_indices": [0],
                "vision_output_dim": 64,
            },
        },
        {*PLAIN, (48, 32), (32, 48)},
    ),
    "t5": ("T5ForConditionalGeneration", {"d_model": 64, "d_kv": 16, "d_ff": 176, "num_heads": 4, "num_layers": 1}, {
        (64, 64), (176, 64), (64, 176), (1000, 64),
    }),
}  # fmt: skip


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_configs_of_many_families(family, named, config):
    """All of a model, its head too: of the class that the config names, in the dtype that it names."""
    pytest.importorskip("transformers")
    architecture, changes, expected = FAMILIES[family]
    given = {"architectures": [architecture]} if named else {}
    if not named and family == "mllama":
        pytest.skip("without its class the text model serves, whose own config has no dtype")
    found = from_config(config({"model_type": family, "torch_dtype": "bfloat16", **given, **SMALL, **changes}))
    assert expected <= set(sizes(found))
    assert {each.dtype for each in found} == {torch.bfloat16}


def test_a_config_of_nothing_known(config, tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=r"config is .*json, from which transformers cannot make a model: ") as error:
        from_config(config({"model_type": "nonesuch"}))
    assert "\n" not in str(error.value)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="from which transformers cannot make a model"):
        from_config(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "3", "[]", json.dumps(LLAMA | {"hidden_size": "wide"}), json.dumps(LLAMA | {"hidden_size": -64}),
        json.dumps(LLAMA | {"num_attention_heads": 0}), json.dumps({"model_type": "timm_wrapper"}),
    ],
)  # fmt: skip
def test_a_config_of_which_no_model_is_made(content, tmp_path):
    """Whatever transformers raises: of a missing package too."""
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"from which transformers cannot make a model: [^ ]") as error:
        from_config(tmp_path)
    assert "\n" not in str(error.value)


def test_no_config(tmp_path):
    with pytest.raises(ValueError, match=r"config is .*; expected a Hugging Face config\.json"):
        from_config(tmp_path)


def test_without_transformers(config, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r"transformers, which is not installed.*--weights"):
        from_config(config(LLAMA))


def safetensors(path, **tensors):
    """A file of these dtypes and shapes, without the tensors: only its header is read."""
    entries = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]} for name, (dtype, *shape) in tensors.items()
    }
    text = json.dumps({"__metadata__": {"format": "pt"}} | entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    return path


def test_a_safetensors_file(tmp_path):
    file = safetensors(
        tmp_path / "model.safetensors", **{
            "model.embed_tokens.weight": ("BF16", 1000, 64),
            "model.layers.0.q_proj.weight": ("BF16", 32, 64),
            "model.layers.0.q_proj.bias": ("BF16", 32),
            "model.layers.0.norm.weight": ("BF16", 64),
            "model.layers.0.conv.weight": ("F32", 3, 4, 5),
            "model.layers.0.quantized.weight": ("I8", 3, 4),
            "model.layers.0.cache": ("F32", 3, 4),
            "model.layers.0.empty.weight": ("F32", 0, 4),
            "model.layers.0.down.weight": ("F32", 64, 48),
        },
    )  # fmt: skip
    found = from_safetensors(file)
    tied = Weight(1000, 64, torch.bfloat16)
    assert found == [Weight(32, 64, torch.bfloat16), Weight(64, 48, torch.float32), tied]


def test_embeddings_are_no_weights_unless_one_may_be_the_head(tmp_path):
    embeddings = {
        "wte.weight": ("F16", 500, 16),
        "wpe.weight": ("F16", 128, 16),
        "type_embeddings.weight": ("F16", 2, 16),
    }
    tied = safetensors(tmp_path / "tied.safetensors", **embeddings)
    assert sizes(from_safetensors(tied)) == [(500, 16)]
    both = safetensors(tmp_path / "both.safetensors", **embeddings, **{"lm_head.weight": ("F16", 500, 16)})
    assert sizes(listed(from_safetensors(both), None, None)) == [(500, 16)]


def test_a_folder_of_files(tmp_path):
    for index in (2, 1):
        safetensors(tmp_path / f"model-{index}.safetensors", **{f"{index}.weight": ("F16", index, 8)})
    assert sizes(from_safetensors(tmp_path)) == [(1, 8), (2, 8)]


def test_a_file_as_safetensors_writes_it(tmp_path):
    library = pytest.importorskip("safetensors.torch")
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4, dtype=torch.bfloat16))
    library.save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert sorted(from_safetensors(tmp_path), key=str) == sorted(from_torch(model), key=str)


def test_the_files_that_an_index_lists(tmp_path):
    """And no other of the folder, such as the same weights in other names."""
    index = {"weight_map": {"a.weight": "model-1.safetensors", "b.weight": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, n in (("model-1", 1), ("model-2", 2), ("consolidated", 3)):
        safetensors(tmp_path / f"{name}.safetensors", **{f"{n}.weight": ("F16", n, 8)})
    assert sizes(from_safetensors(tmp_path)) == [(1, 8), (2, 8)]
    assert sizes(from_safetensors(tmp_path / "model.safetensors.index.json")) == [(1, 8), (2, 8)]
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(ValueError, match=r"safetensors: .*model-2\.safetensors: No such file"):
        from_safetensors(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', "[" * 100_000])
def test_an_index_of_another_kind(content, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        with pytest.raises(ValueError, match=r"index\.json is no index of safetensors files"):
            from_safetensors(path)


def test_quantized_files_are_tuned_for_the_dtype_they_are_run_in(tmp_path):
    file = safetensors(
        tmp_path / "model.safetensors",
        **{
            "fp8.weight": ("F8_E4M3", 32, 64),
            "fp8.weight_scale_inv": ("F32", 1, 1),
            "packed.qweight": ("I32", 4, 8),
            "four_bits.weight": ("U8", 1024, 1),
        },
    )
    assert sizes(listed(from_safetensors(file), torch.bfloat16, None)) == [(32, 64)]
    with pytest.raises(ValueError, match=r"found no linear layer in .*; give a dtype"):
        listed(from_safetensors(file), None, None)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\x08\0\0\0\0\0\0\0", b"\xff" * 16, struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 8) + b'{"a": 1}',
        struct.pack("<Q", 9) + b'{"a": {}}', struct.pack("<Q", 3) + b"\xff\xff\xff",
        struct.pack("<Q", 35) + b'{"a": {"dtype": "F32", "shape": 3}}',
        struct.pack("<Q", 41) + b'{"a": {"dtype": "F32", "shape": [1e400]}}',
        struct.pack("<Q", 100_000) + b"[" * 100_000,
    ],
)  # fmt: skip
def test_a_file_of_another_kind(content, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors is no safetensors file"):
        from_safetensors(tmp_path)


def test_a_pointer_of_git_lfs(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ValueError, match="is a pointer of Git LFS; `git lfs pull`"):
        from_safetensors(file)


def test_no_safetensors_file(tmp_path):
    with pytest.raises(ValueError, match=r"safetensors is .*; expected a \.safetensors file, or a folder"):
        from_safetensors(tmp_path)
    with pytest.raises(ValueError, match=r"safetensors: .*missing\.safetensors: No such file"):
        from_safetensors(tmp_path / "missing.safetensors")
