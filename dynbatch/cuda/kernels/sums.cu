// Sums whose terms lie in several rows: pulled gradients, gradients of lookup tables, sums over a batch.
//
// No atomics: the order of additions is fixed.

// For each row, the sum of the gradients that its consumers wrote to their edges, in the edges' order: those at offsets
// boundaries[r] to boundaries[r + 1]. A team for each row; rows follow each other from `start` on.
extern "C" __global__ void sum_edges(real* mem, integer rows, int width, integer start, const integer* boundaries,
                                     const integer* offsets) {
    const integer r = integer(blockIdx.x) * blockDim.y + threadIdx.y;
    if (r >= rows) return;
    for (int j = WIDE * threadIdx.x; j < width; j += WIDE * blockDim.x) {
        const int left = width - j;
        real sum[WIDE] = {};
        const integer begin = boundaries[r];
        for (integer e = begin; e < boundaries[r + 1]; ++e) {
            real x[WIDE];
            load(x, mem + offsets[e] + j, left);
#pragma unroll
            for (int k = 0; k < WIDE; ++k)  // the first is copied, not added to zero: a negative zero stays
                if (k < left) sum[k] = e > begin ? sum[k] + x[k] : x[k];
        }
        store(mem + start + r * width + j, sum, left);
    }
}

// Rows of a gradient table: to row ids[s] are added, in this order, the rows of `mem` whose places are offsets
// boundaries[s] to boundaries[s + 1]. A team for each of the `rows` different ids.
extern "C" __global__ void lookup_gradient(real* gradient, integer rows, int width, const integer* ids,
                                           const integer* boundaries, const integer* offsets, const real* mem) {
    const integer s = integer(blockIdx.x) * blockDim.y + threadIdx.y;
    if (s >= rows) return;
    real* const to = gradient + ids[s] * width;
    for (int j = WIDE * threadIdx.x; j < width; j += WIDE * blockDim.x) {
        const int left = width - j;
        real sum[WIDE];
        load(sum, to + j, left);
        for (integer k = boundaries[s]; k < boundaries[s + 1]; ++k) {
            real x[WIDE];
            load(x, mem + offsets[k] + j, left);
#pragma unroll
            for (int i = 0; i < WIDE; ++i)
                if (i < left) sum[i] += x[i];
        }
        store(to + j, sum, left);
    }
}

// The sum over a batch, first stage: row b of `sums` is the sum of rows b * SLICE to (b + 1) * SLICE.
// Blocks of 32 by 8 threads, for 32 columns (x) of a slice (y).
constexpr int SLICE = 256;

extern "C" __global__ void __launch_bounds__(256, 1) sum_slices(real* sums, integer rows, int width, const real* mem,
                                                               integer start, integer stride) {
    __shared__ real part[8][32];
    const int j = 32 * blockIdx.x + threadIdx.x;
    const integer begin = integer(blockIdx.y) * SLICE;
    const integer end = begin + SLICE < rows ? begin + SLICE : rows;
    real sum = 0;
    if (j < width)
        for (integer r = begin + threadIdx.y; r < end; r += 8) sum += mem[start + r * stride + j];
    part[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || j >= width) return;
    for (int k = 1; k < 8; ++k) sum += part[k][threadIdx.x];
    sums[integer(blockIdx.y) * width + j] = sum;
}

// Second stage: result[j] becomes the sum of the slices' sums. A thread for each column.
extern "C" __global__ void add_slices(real* result, integer slices, int width, const real* sums) {
    const int j = blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= width) return;
    real sum = 0;
    for (integer s = 0; s < slices; ++s) sum += sums[s * width + j];
    result[j] = sum;
}

// Parts of arrays, given by addresses and sizes, grow by others. No part is there twice. A row of blocks (y) goes over
// each part, or over every so many where parts are more than blocks; threads (x) over its elements.
extern "C" __global__ void add_parts(const integer* to, const integer* from, const integer* sizes, integer parts) {
    for (integer part = blockIdx.y; part < parts; part += gridDim.y) {
        real* const sum = reinterpret_cast<real*>(to[part]);
        const real* const x = reinterpret_cast<const real*>(from[part]);
        for (integer i = integer(blockIdx.x) * blockDim.x + threadIdx.x; i < sizes[part];
             i += integer(gridDim.x) * blockDim.x)
            sum[i] += x[i];
    }
}
