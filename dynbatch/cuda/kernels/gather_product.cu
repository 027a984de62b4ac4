// A weight's product with a vector of each row, the vectors read through their places instead of from a gathered copy.
//
// result[r][i] = sum over l of x[r][l] * w[l][i], w being `inner` rows of `width`; with `transposed`, w is `width` rows
// of `inner`, and the sum is over w[i][l]. Where rows of x lie: as for an operand (common.cuh). A block computes a tile
// of TALL rows by BROAD columns, and keeps the DEEP parts of both factors that it is at in shared memory. Each sum goes
// over l in order, whatever the tile, so that a row's result does not depend on how many rows there are.

template <int TALL, int BROAD, int DEEP, int TALL_EACH, int BROAD_EACH>
__device__ inline void tile_product(real* mem, integer rows, integer start, integer step, OPERAND(x), const real* w,
                                    int inner, int width, int transposed) {
    constexpr int ACROSS = BROAD / BROAD_EACH, THREADS = ACROSS * (TALL / TALL_EACH);
    // one more than needed, so that threads which read along the other direction meet different banks
    __shared__ real xs[DEEP][TALL + 1], ws[DEEP][BROAD + 1];
    const integer top = integer(blockIdx.x) * TALL;
    const int left = blockIdx.y * BROAD;
    const int across = threadIdx.x % ACROSS, down = threadIdx.x / ACROSS;
    real sums[TALL_EACH][BROAD_EACH] = {};
    for (int depth = 0; depth < inner; depth += DEEP) {
        for (int at = threadIdx.x; at < TALL * DEEP; at += THREADS) {
            const int l = at % DEEP, r = at / DEEP;
            const bool there = top + r < rows && depth + l < inner;
            xs[l][r] = there ? ROW_OF(x, top + r)[depth + l] : real(0);
        }
        for (int at = threadIdx.x; at < BROAD * DEEP; at += THREADS) {
            const int l = transposed ? at % DEEP : at / BROAD, i = transposed ? at / DEEP : at % BROAD;
            const bool there = left + i < width && depth + l < inner;
            const integer place = transposed ? integer(left + i) * inner + depth + l : integer(depth + l) * width + left + i;
            ws[l][i] = there ? w[place] : real(0);
        }
        __syncthreads();
        const int deep = inner - depth < DEEP ? inner - depth : DEEP;
        for (int l = 0; l < deep; ++l) {
            real xl[TALL_EACH], wl[BROAD_EACH];
#pragma unroll
            for (int a = 0; a < TALL_EACH; ++a) xl[a] = xs[l][down * TALL_EACH + a];
#pragma unroll
            for (int b = 0; b < BROAD_EACH; ++b) wl[b] = ws[l][across + b * ACROSS];
#pragma unroll
            for (int a = 0; a < TALL_EACH; ++a)
#pragma unroll
                for (int b = 0; b < BROAD_EACH; ++b) sums[a][b] += xl[a] * wl[b];
        }
        __syncthreads();
    }
#pragma unroll
    for (int a = 0; a < TALL_EACH; ++a) {
        const integer r = top + down * TALL_EACH + a;
        if (r >= rows) return;
#pragma unroll
        for (int b = 0; b < BROAD_EACH; ++b) {
            const int i = left + across + b * ACROSS;
            if (i < width) mem[start + r * step + i] = sums[a][b];
        }
    }
}

#define GATHER_PRODUCT(name, TALL, BROAD, TALL_EACH, BROAD_EACH)                                                   \
    extern "C" __global__ void __launch_bounds__(256, 1)                                                           \
        name(real* mem, integer rows, integer start, integer step, OPERAND(x), const real* w, int inner, int width, \
             int transposed) {                                                                                     \
        tile_product<TALL, BROAD, 16, TALL_EACH, BROAD_EACH>(mem, rows, start, step, x, x_offsets, x_place,        \
                                                             x_stride, w, inner, width, transposed);               \
    }

// 256 threads each: for many rows, for few, and for very few.
GATHER_PRODUCT(gather_product_64, 64, 64, 4, 4)
GATHER_PRODUCT(gather_product_16, 16, 64, 2, 2)
GATHER_PRODUCT(gather_product_4, 4, 64, 1, 1)
