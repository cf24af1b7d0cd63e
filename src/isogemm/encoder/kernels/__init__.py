"""The fused layer's kernels in three formulations, each with `KERNELS` and `describe`.

    project               n = norm(x); q, k, v = n Wqkv + bqkv; in a backward also do = ds Wo
    out_project           s = x + dropout(o Wo + bo), or norm(x) + ...
    feedforward           s = x + o Wo + bo, or s = x without o; u = norm(s); y = s + dropout(act(u W1 + b1)) W2 + b2;
                          with RESIDUAL_NORMED y = u + ...; with NORM_LAST the norm of that
    feedforward_backward  from dy to ds; for a batch norm to du. Writes u, act(z), dz and dlast after dropout, which the
                          weights' gradients need
    input_grad            dx = ds + (dq Wq + dk Wk + dv Wv) through the norm of x, and that norm for the weights'
                          gradients. RESIDUAL: whether the residual's gradient goes "around" the norm, "through" it, or
                          is added by another launch
    weight_grads          a chunk's left^T right of two weights, the sums of left's columns, and the tiles' sums

`describe(name, layer, config, call)` gives a launch on these arguments, None for absent ones:

- project: x, the norm's weight and bias; in_proj's weights and biases of q, k and v; qkv (out); ds, out_proj's weight
  and do (out), in a backward; linear1's and linear2's weights and the packed weights (out), in a forward; v (out) where
  it is not part of qkv. With `call.transpose`, transposes are packed too.
- out_project: x (or what is normed here), o, out_proj's weight and bias, that norm's weight and bias, seed, s (out).
- feedforward: x, o, out_proj's, linear1's and linear2's weight and bias; both norms' weight and bias; y and the sum
  before the last norm (out); seed. A batch norm's weight is its statistics. Without o, x is s.
- feedforward_backward: x, o, out_proj's weight and bias, linear1's weight and bias, linear1's and linear2's weights
  transposed, the first norm's weight and bias, the last norm's weight, dy, the sum before the last norm; u, act(z), dz,
  dlast, ds, the tiles' sums and (not by fragments) dlast transposed (out); seed; dlast after dropout (out).
- input_grad: x, the norm's weight and bias, in_proj's weight transposed, dqkv, ds; the normed x, dx and the tiles' sums
  (out); not by fragments: o, and ds as an operand and o transposed (out); the residual's gradient where it is not ds.
- weight_grads: left, right, left, right of two products left^T right, the tiles' sums, the chunks' partial sums (out).
"""
