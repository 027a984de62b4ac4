// Softmaxes, layer normalization and masks of maxima along one dimension of values that fused kernels do not take.
//
// A team (common.cuh) for each line of elements along the dimension: `size` of them at distances of `inner`, where
// `inner` and `outer` are the numbers of elements in the dimensions before and behind it. Operands as in shapes.cu;
// the result's rows lie at start, start + step, ... of `mem`.

struct Line {
    integer r;  // the row
    int first;  // place in the row of the line's first element
    bool exists;
};

__device__ inline Line this_line(integer rows, int inner, int size, int outer) {
    const integer line = integer(blockIdx.x) * blockDim.y + threadIdx.y;
    const int of_row = int(line % (inner * outer));
    return {line / (inner * outer), of_row / inner * size * inner + of_row % inner, line < rows * inner * outer};
}

#define LINE_KERNEL(name, ...)                                                                              \
    extern "C" __global__ void __launch_bounds__(256, 1) name(real* mem, integer rows, integer start, integer step, \
                                                             int inner, int size, int outer, __VA_ARGS__)

#define EACH(i) for (int i = threadIdx.x; i < size; i += blockDim.x)
#define AT(x, i) x[line.first + (i) * inner]

#define THIS_LINE                                               \
    const Line line = this_line(rows, inner, size, outer);      \
    if (!line.exists) return;                                   \
    real* const y = mem + start + line.r * step

// exp(x - top) summed, and the maximum: 0 where all is masked, and then the sum is 1.
struct Exponentials {
    real top, total;
};

__device__ inline Exponentials exponentials(const real* x, Line line, int inner, int size) {
    real top = -infinity(), total = 0;
    EACH(i) top = math::greatest(top, AT(x, i));
    top = team_reduce<Greatest>(top);
    if (top == -infinity()) top = 0;
    EACH(i) total += math::exp(AT(x, i) - top);
    total = team_reduce<Sum>(total);
    return {top, total == 0 ? real(1) : total};
}

LINE_KERNEL(softmax, OPERAND(x)) {
    THIS_LINE;
    const real* const of = ROW_OF(x, line.r);
    const Exponentials e = exponentials(of, line, inner, size);
    EACH(i) AT(y, i) = math::exp(AT(of, i) - e.top) / e.total;
}

LINE_KERNEL(log_softmax, OPERAND(x)) {
    THIS_LINE;
    const real* const of = ROW_OF(x, line.r);
    const Exponentials e = exponentials(of, line, inner, size);
    const real log_total = math::log(e.total);
    EACH(i) AT(y, i) = AT(of, i) - e.top - log_total;
}

// out * (dout - sum(out * dout))
LINE_KERNEL(softmax_gradient, OPERAND(x), OPERAND(dout)) {
    THIS_LINE;
    const real *const out = ROW_OF(x, line.r), *const d = ROW_OF(dout, line.r);
    real total = 0;
    EACH(i) total += AT(out, i) * AT(d, i);
    total = team_reduce<Sum>(total);
    EACH(i) AT(y, i) = AT(out, i) * AT(d, i) - AT(out, i) * total;
}

// dout - exp(out) * sum(dout)
LINE_KERNEL(log_softmax_gradient, OPERAND(x), OPERAND(dout)) {
    THIS_LINE;
    const real *const out = ROW_OF(x, line.r), *const d = ROW_OF(dout, line.r);
    real total = 0;
    EACH(i) total += AT(d, i);
    total = team_reduce<Sum>(total);
    EACH(i) AT(y, i) = AT(d, i) - math::exp(AT(out, i)) * total;
}

// The first place of the maximum is 1, all others 0; a NaN is a maximum.
struct Least {
    static __device__ inline int join(int x, int y) { return x < y ? x : y; }
};

LINE_KERNEL(one_hot_argmax, OPERAND(x)) {
    THIS_LINE;
    const real* const of = ROW_OF(x, line.r);
    real top = -infinity();
    EACH(i) top = math::greatest(top, AT(of, i));
    top = team_reduce<Greatest>(top);
    int first = size;
    EACH(i) if (first == size && (AT(of, i) == top || AT(of, i) != AT(of, i))) first = i;
    first = team_reduce<Least>(first);
    EACH(i) AT(y, i) = i == first ? real(1) : real(0);
}

// Mean, and one divided by the deviation.
struct Moments {
    real mean, inverse_deviation;
};

__device__ inline Moments moments(const real* x, Line line, int inner, int size, real eps) {
    real total = 0, squares = 0;
    EACH(i) total += AT(x, i);
    const real mean = team_reduce<Sum>(total) / real(size);
    EACH(i) squares += (AT(x, i) - mean) * (AT(x, i) - mean);
    return {mean, math::inverse_root(team_reduce<Sum>(squares) / real(size) + eps)};
}

LINE_KERNEL(normalize, OPERAND(x), real eps) {
    THIS_LINE;
    const real* const of = ROW_OF(x, line.r);
    const Moments m = moments(of, line, inner, size, eps);
    EACH(i) AT(y, i) = (AT(of, i) - m.mean) * m.inverse_deviation;
}

// (dout - mean(dout) - out * mean(dout * out)) / deviation of x
LINE_KERNEL(normalize_gradient, OPERAND(x), OPERAND(out), OPERAND(dout), real eps) {
    THIS_LINE;
    const real *const of = ROW_OF(x, line.r), *const o = ROW_OF(out, line.r), *const d = ROW_OF(dout, line.r);
    real total = 0, along = 0;
    EACH(i) total += AT(d, i);
    EACH(i) along += AT(d, i) * AT(o, i);
    const real mean = team_reduce<Sum>(total) / real(size);
    along = team_reduce<Sum>(along) / real(size);
    const Moments m = moments(of, line, inner, size, eps);
    EACH(i) AT(y, i) = (AT(d, i) - mean - AT(o, i) * along) * m.inverse_deviation;
}
