// The trainers' update rules, in one pass over values, gradients and state; see dynbatch/cpu/trainer_kernels.py, whose
// names they have. The rules round as they are written, like there.
//
// `starts` and `stops` say which parts of the flat arrays take part. A row of blocks (y) goes over each part, or over
// every so many where parts are more than blocks; threads (x) over its elements.

#define EACH_ELEMENT(i)                                                                         \
    for (integer part = blockIdx.y; part < parts; part += gridDim.y)                            \
        for (integer i = starts[part] + integer(blockIdx.x) * blockDim.x + threadIdx.x; i < stops[part]; \
             i += integer(gridDim.x) * blockDim.x)

// A number whose sums and products are each rounded, which contraction to fused operations would leave out.
struct Exact {
    real x;
    __device__ inline Exact(real value = 0) : x(value) {}
};

#if DOUBLE
#define ROUNDED(operation) __d##operation##_rn
#else
#define ROUNDED(operation) __f##operation##_rn
#endif
__device__ inline Exact operator+(Exact a, Exact b) { return ROUNDED(add)(a.x, b.x); }
__device__ inline Exact operator-(Exact a, Exact b) { return ROUNDED(sub)(a.x, b.x); }
__device__ inline Exact operator*(Exact a, Exact b) { return ROUNDED(mul)(a.x, b.x); }
__device__ inline Exact operator/(Exact a, Exact b) { return ROUNDED(div)(a.x, b.x); }
__device__ inline Exact root(Exact a) { return math::sqrt(a.x); }
__device__ inline Exact zero_if_tiny(Exact a, real tiny) { return math::abs(a.x) < tiny ? real(0) : a.x; }

#define RULE(name, ...) extern "C" __global__ void name(Exact* x, Exact* g, __VA_ARGS__)
#define PARTS const integer *starts, const integer *stops, integer parts, real keep

RULE(sgd, PARTS, real rate) {
    EACH_ELEMENT(i) {
        x[i] = (x[i] - rate * g[i]) * keep;
        g[i] = 0;
    }
}

RULE(momentum, Exact* velocity, PARTS, real rate, real mom, real tiny) {
    EACH_ELEMENT(i) {
        const Exact v = mom * velocity[i] - rate * g[i];
        velocity[i] = zero_if_tiny(v, tiny);
        x[i] = (x[i] + v) * keep;
        g[i] = 0;
    }
}

RULE(adagrad, Exact* squares, PARTS, real clip, real lr, real eps) {
    EACH_ELEMENT(i) {
        const Exact d = clip * g[i];
        const Exact v = squares[i] + d * d;
        squares[i] = v;
        x[i] = (x[i] - lr * d / root(v + eps)) * keep;
        g[i] = 0;
    }
}

RULE(rmsprop, Exact* squares, PARTS, real clip, real lr, real eps, real rho, real rest, real tiny) {
    EACH_ELEMENT(i) {
        const Exact d = clip * g[i];
        const Exact v = rho * squares[i] + rest * (d * d);
        squares[i] = zero_if_tiny(v, tiny);
        x[i] = (x[i] - lr * d / root(v + eps)) * keep;
        g[i] = 0;
    }
}

RULE(adam, Exact* mean, Exact* squares, PARTS, real clip, real lr, real eps, real beta_1, real rest_1, real beta_2,
     real rest_2, real tiny) {
    EACH_ELEMENT(i) {
        const Exact d = clip * g[i];
        const Exact m = beta_1 * mean[i] + rest_1 * d;
        const Exact v = beta_2 * squares[i] + rest_2 * (d * d);
        mean[i] = zero_if_tiny(m, tiny);
        squares[i] = zero_if_tiny(v, tiny);
        x[i] = (x[i] - lr * m / (root(v) + eps)) * keep;
        g[i] = 0;
    }
}

RULE(amsgrad, Exact* mean, Exact* squares, Exact* largest, PARTS, real clip, real lr, real eps, real beta_1,
     real rest_1, real beta_2, real rest_2, real tiny) {
    EACH_ELEMENT(i) {
        const Exact d = clip * g[i];
        const Exact m = beta_1 * mean[i] + rest_1 * d;
        const Exact v = beta_2 * squares[i] + rest_2 * (d * d);
        mean[i] = zero_if_tiny(m, tiny);
        squares[i] = zero_if_tiny(v, tiny);
        const Exact most = v.x > largest[i].x ? v : largest[i];
        largest[i] = zero_if_tiny(most, tiny);
        x[i] = (x[i] - lr * m / (root(most) + eps)) * keep;
        g[i] = 0;
    }
}

// x *= keep
extern "C" __global__ void scale(real* x, integer size, real keep) {
    const integer i = integer(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < size) x[i] *= keep;
}

// The sum of squares in float64, first stage: one number for each block, of 256 threads in x, at
// sums[blockIdx.y * gridDim.x + blockIdx.x]. `add_norms` adds those up, in one block of 256 threads.
extern "C" __global__ void __launch_bounds__(256, 1) squared_norm(double* sums, const real* g, const integer* starts,
                                                                 const integer* stops, integer parts) {
    double sum = 0;
    EACH_ELEMENT(i) sum += double(g[i]) * double(g[i]);
    sum = team_reduce<Sum>(sum);
    if (threadIdx.x == 0) sums[integer(blockIdx.y) * gridDim.x + blockIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(256, 1) add_norms(double* norm, integer count, const double* sums) {
    double sum = 0;
    for (integer i = threadIdx.x; i < count; i += blockDim.x) sum += sums[i];
    sum = team_reduce<Sum>(sum);
    if (threadIdx.x == 0) *norm = sum;
}
