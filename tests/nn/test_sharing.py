"""What a module takes over from another, and what it would lose."""

import pytest
import torch

from isogemm.nn.sharing import module_obstacle, needs_its_forward, parameter, parameter_obstacle, shared, shown_name


def test_a_shared_module_has_the_same_parameters_and_hooks():
    module = torch.nn.Linear(3, 2)
    module.tag = "mine"
    handle = module.register_forward_hook(lambda *_: None)
    made = shared(torch.nn.Linear, module, without=("tag",))
    assert made.weight is module.weight
    assert made._parameters is not module._parameters
    assert not hasattr(made, "tag")
    assert len(made._forward_hooks) == 1
    handle.remove()
    assert not made._forward_hooks


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda module: setattr(module, "forward", module.forward), "replaced on the instance"),
        (lambda module: module.compile(), "it is compiled"),
        (lambda module: module.register_load_state_dict_pre_hook(lambda *_: None), "load_state_dict pre-hook"),
    ],
)
def test_why_a_module_is_not_replaced(change, reason):
    module = torch.nn.Linear(3, 2)
    assert not module_obstacle(module)
    change(module)
    assert reason in module_obstacle(module)


def test_parameters_that_cannot_be_taken_over():
    plain, normed = (
        torch.nn.Linear(3, 2, bias=False),
        torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 2)),
    )
    assert not parameter_obstacle(plain, "weight", "bias")
    assert "made from other parameters" in parameter_obstacle(normed, "weight")
    assert parameter(plain, "bias") is None
    assert torch.equal(parameter(normed, "weight"), normed.weight)


def test_what_needs_a_modules_own_forward():
    class Doubled(torch.nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    known = (torch.nn.Linear.forward,)
    assert not needs_its_forward(torch.nn.Linear(3, 2), known)
    assert "a forward of its own" in needs_its_forward(Doubled(3, 2), known)
    assert not needs_its_forward(Doubled(3, 2))
    hooked = torch.nn.Linear(3, 2)
    hooked.register_forward_pre_hook(lambda *_: None)
    assert needs_its_forward(hooked, known) == "has hooks"
    assert shown_name(hooked) == "Linear"
