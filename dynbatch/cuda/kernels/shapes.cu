// Values of up to four dimensions, moved and reduced within their rows: what is no plain copy, and no fused kernel.
//
// A thread for each element of the result (common.cuh). The result's rows lie at start, start + step, ... of `mem`.

// Elements in another arrangement: transposed, a slice, stretched (strides of 0), or a part of a concatenation.
// `n` are the sizes, `s` the operand's strides, `t` those of the result.
extern "C" __global__ void rearrange(real* mem, integer rows, integer start, integer step, OPERAND(x), FOUR(int, n),
                                     FOUR(integer, s), FOUR(integer, t)) {
    ROW_AND_ELEMENT(r, i, n0 * n1 * n2 * n3);
    mem[start + r * step + place_of(i, GIVEN(n), GIVEN(t))] = ROW_OF(x, r)[place_of(i, GIVEN(n), GIVEN(s))];
}

// Zeros, but for the operand from `first` on along a dimension, of which the operand has `part` of `size` elements;
// `inner` and `outer` are the numbers of elements in the dimensions before and behind it.
extern "C" __global__ void pad_range(real* mem, integer rows, integer start, integer step, OPERAND(x), int inner,
                                     int size, int outer, int first, int part) {
    ROW_AND_ELEMENT(r, i, inner * size * outer);
    const int at = i / inner % size - first;
    const int o = i / (inner * size);
    const bool there = at >= 0 && at < part;
    mem[start + r * step + i] = there ? ROW_OF(x, r)[(o * part + at) * inner + i % inner] : real(0);
}

// The `count` elements along a dimension of `size` whose numbers are indices[r], indices[r + column], ...
extern "C" __global__ void select_along(real* mem, integer rows, integer start, integer step, OPERAND(x), int inner, int size,
                                  int outer, int count, const integer* indices, integer column) {
    ROW_AND_ELEMENT(r, i, inner * count * outer);
    const int k = i / inner % count;
    const int o = i / (inner * count);
    const int at = int(indices[r + k * column]);
    mem[start + r * step + i] = ROW_OF(x, r)[(o * size + at) * inner + i % inner];
}

// Its gradient: zeros with the operand added at the indices, in their order.
extern "C" __global__ void select_along_gradient(real* mem, integer rows, integer start, integer step, OPERAND(x), int inner,
                                           int size, int outer, int count, const integer* indices, integer column) {
    ROW_AND_ELEMENT(r, i, inner * size * outer);
    const int at = i / inner % size;
    const int o = i / (inner * size);
    real sum = 0;
    for (int k = 0; k < count; ++k)
        if (indices[r + k * column] == at) sum += ROW_OF(x, r)[(o * count + k) * inner + i % inner];
    mem[start + r * step + i] = sum;
}

// Reductions. `n` are the sizes of the result and `s` the operand's strides along them; `m` and `u` those of what is
// reduced, which goes in storage order.
template <class How>
__device__ inline real reduced(const real* from, real initial, FOUR(int, m), FOUR(integer, u)) {
    real total = initial;
    for (int d = 0; d < m3; ++d)
        for (int c = 0; c < m2; ++c)
            for (int b = 0; b < m1; ++b)
                for (int a = 0; a < m0; ++a) total = How::join(total, from[a * u0 + b * u1 + c * u2 + d * u3]);
    return total;
}

#define REDUCTION(name, How, initial, final)                                                                     \
    extern "C" __global__ void name(real* mem, integer rows, integer start, integer step, OPERAND(x), FOUR(int, n), \
                                    FOUR(integer, s), FOUR(int, m), FOUR(integer, u)) {                         \
        ROW_AND_ELEMENT(r, i, n0 * n1 * n2 * n3);                                                               \
        const real* const from = ROW_OF(x, r) + place_of(i, GIVEN(n), GIVEN(s));                                \
        const real total = reduced<How>(from, initial, GIVEN(m), GIVEN(u));                                     \
        mem[start + r * step + i] = final;                                                                      \
    }

REDUCTION(sum_to, Sum, 0, total)
REDUCTION(mean_to, Sum, 0, total / real(m0 * m1 * m2 * m3))
REDUCTION(max_to, Greatest, -infinity(), total)
