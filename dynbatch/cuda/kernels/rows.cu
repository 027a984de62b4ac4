// Rows moved as they are: gathered by place, copied at equal distances, looked up in tables.
//
// A team (common.cuh) for each row.

__device__ inline void copy_row(const real* from, real* to, int width) {
    for (int j = WIDE * threadIdx.x; j < width; j += WIDE * blockDim.x) {
        real x[WIDE];
        load(x, from + j, width - j);
        store(to + j, x, width - j);
    }
}

// Row r of `mem`, from `start` on at distances of `stride`, becomes what lies at offsets[r] + column of `data`.
extern "C" __global__ void gather(real* mem, integer rows, int width, integer start, integer stride, const real* data,
                                  const integer* offsets, integer column) {
    const integer r = integer(blockIdx.x) * blockDim.y + threadIdx.y;
    if (r < rows) copy_row(data + offsets[r] + column, mem + start + r * stride, width);
}

// The same for rows at equal distances.
extern "C" __global__ void copy_rows(real* mem, integer rows, int width, integer start, integer stride, integer source,
                                     integer source_stride) {
    const integer r = integer(blockIdx.x) * blockDim.y + threadIdx.y;
    if (r < rows) copy_row(mem + source + r * source_stride, mem + start + r * stride, width);
}

// The same for rows of a table, by number.
extern "C" __global__ void lookup_rows(real* mem, integer rows, int width, integer start, integer stride,
                                       const real* table, const integer* indices) {
    const integer r = integer(blockIdx.x) * blockDim.y + threadIdx.y;
    if (r < rows) copy_row(table + indices[r] * width, mem + start + r * stride, width);
}
