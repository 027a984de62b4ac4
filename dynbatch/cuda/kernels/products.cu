// Products of matrices that each row has its own of, found by their places: nothing is gathered.
//
// Matrices are column-major. Operands are as in common.cuh; the result's rows lie at start, start + step, ... of `mem`.

// a * b, of m by k and k by n; ta and tb say that an operand lies transposed. A thread for each element of the result:
// where `a` is not transposed, neighbours read neighbours.
extern "C" __global__ void product(real* mem, integer rows, integer start, integer step, OPERAND(a), OPERAND(b), int m,
                                   int k, int n, int ta, int tb) {
    ROW_AND_ELEMENT(r, at, m * n);
    const int i = at % m, j = at / m;
    const real* const left = ROW_OF(a, r) + (ta ? i * k : i);
    const real* const right = ROW_OF(b, r) + (tb ? j : j * k);
    const int left_step = ta ? 1 : m, right_step = tb ? n : 1;
    real sum = 0;
    for (int l = 0; l < k; ++l) sum += left[integer(l) * left_step] * right[integer(l) * right_step];
    mem[start + r * step + at] = sum;
}

// The same where `a` lies transposed and `b` does not: both are read along columns, by a team (common.cuh) for each
// element of the result.
extern "C" __global__ void __launch_bounds__(256, 1) product_of_columns(real* mem, integer rows, integer start,
                                                                       integer step, OPERAND(a), OPERAND(b), int m,
                                                                       int k, int n) {
    const integer element = integer(blockIdx.x) * blockDim.y + threadIdx.y;
    const integer r = element / (m * n);
    const int at = int(element % (m * n));
    if (r >= rows) return;
    const real* const left = ROW_OF(a, r) + at % m * k;
    const real* const right = ROW_OF(b, r) + at / m * k;
    real sum = 0;
    for (int l = WIDE * threadIdx.x; l < k; l += WIDE * blockDim.x) {
        real x[WIDE], y[WIDE];
        load(x, left + l, k - l);
        load(y, right + l, k - l);
#pragma unroll
        for (int e = 0; e < WIDE; ++e)
            if (e < k - l) sum += x[e] * y[e];
    }
    sum = team_reduce<Sum>(sum);
    if (threadIdx.x == 0) mem[start + r * step + at] = sum;
}
