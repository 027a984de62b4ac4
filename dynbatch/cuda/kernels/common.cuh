// What all kernels share: numbers, 16-byte accesses, functions by the names that formulas use, reductions, random draws.
//
// A source is compiled behind `#define DOUBLE 0` for float32 or `#define DOUBLE 1` for float64.

typedef long long integer;            // places in memory, payload, indices
typedef unsigned long long bits64;

#if DOUBLE
typedef double real;
#define REAL_FUNCTION(name) ::name
#else
typedef float real;
#define REAL_FUNCTION(name) ::name##f
#endif

constexpr int WIDE = 16 / sizeof(real);  // elements of a 16-byte access

struct alignas(16) Wide {
    real x[WIDE];
};

__device__ inline real infinity() {
    return real(__longlong_as_double(0x7ff0000000000000LL));
}

// ---- functions, as the CPU's kernels have them ------------------------------------------------------------------------

namespace math {

__device__ inline real tanh(real x) { return REAL_FUNCTION(tanh)(x); }
__device__ inline real exp(real x) { return REAL_FUNCTION(exp)(x); }
__device__ inline real log(real x) { return REAL_FUNCTION(log)(x); }
__device__ inline real log1p(real x) { return REAL_FUNCTION(log1p)(x); }
__device__ inline real expm1(real x) { return REAL_FUNCTION(expm1)(x); }
__device__ inline real sqrt(real x) { return REAL_FUNCTION(sqrt)(x); }
__device__ inline real erf(real x) { return REAL_FUNCTION(erf)(x); }
__device__ inline real abs(real x) { return REAL_FUNCTION(fabs)(x); }
__device__ inline real power(real x, real y) { return REAL_FUNCTION(pow)(x, y); }
__device__ inline real inverse_root(real x) { return real(1) / REAL_FUNCTION(sqrt)(x); }
__device__ inline real logistic(real x) { return real(1) / (real(1) + REAL_FUNCTION(exp)(-x)); }
__device__ inline real quotient(real x, real y) { return x / y; }
__device__ inline real sign(real x) { return x > 0 ? real(1) : x < 0 ? real(-1) : x; }
__device__ inline real maximum(real x, real y) { return y > x ? y : x; }  // a NaN in the first stays
__device__ inline real minimum(real x, real y) { return y < x ? y : x; }
__device__ inline real greatest(real x, real y) { return x != x || x > y ? x : y; }  // NaN if either is

// SplitMix64's hash, as in dynbatch/ops/random.py.
__device__ inline bits64 mix(bits64 x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
    return x ^ (x >> 31);
}

// Element `i` of a uniform draw in (0, 1); in double precision, whatever `real` is.
__device__ inline double draw(integer key, integer salt, integer i) {
    const bits64 golden = 0x9E3779B97F4A7C15ULL;
    const bits64 start = mix(bits64(key) + bits64(salt) * golden);
    const bits64 bits = mix(start + bits64(i + 1) * golden);
    return (double(bits >> 12) + 0.5) * 0x1p-52;
}

__device__ inline real uniform(integer key, integer salt, integer i) {
    const double u = draw(key, salt, i);
    const double below_one = 1 - 0x1p-24;  // in float32; what is greater would be rounded to one
    return real(!DOUBLE && u > below_one ? below_one : u);
}

__device__ inline real normal(integer key, integer salt, integer i, integer size) {
    const double radius = ::sqrt(-2.0 * ::log(draw(key, salt, i)));
    return real(radius * ::cos(2.0 * 3.14159265358979323846 * draw(key, salt, i + size)));
}

}  // namespace math

// ---- accesses --------------------------------------------------------------------------------------------------------

// Up to N elements from `from`, of which `left` are there: one 16-byte access where place and number allow it.
template <int N>
__device__ inline void load(real (&x)[N], const real* from, integer left) {
    if (N == WIDE && left >= N && (reinterpret_cast<bits64>(from) & 15) == 0) {
        const Wide wide = *reinterpret_cast<const Wide*>(from);
#pragma unroll
        for (int k = 0; k < N; ++k) x[k] = wide.x[k % WIDE];
    } else {
#pragma unroll
        for (int k = 0; k < N; ++k)
            if (k < left) x[k] = from[k];
    }
}

template <int N>
__device__ inline void store(real* to, const real (&x)[N], integer left) {
    if (N == WIDE && left >= N && (reinterpret_cast<bits64>(to) & 15) == 0) {
        Wide wide;
#pragma unroll
        for (int k = 0; k < N; ++k) wide.x[k % WIDE] = x[k];
        *reinterpret_cast<Wide*>(to) = wide;
    } else {
#pragma unroll
        for (int k = 0; k < N; ++k)
            if (k < left) to[k] = x[k];
    }
}

// ---- teams: the threads of one row, along x: a power of two of them, part of a warp or a block of its own ----------------

__device__ inline unsigned team_mask() {
    if (blockDim.x >= 32) return 0xffffffffu;
    const unsigned lane = (threadIdx.y * blockDim.x + threadIdx.x) & 31;
    return ((1u << blockDim.x) - 1) << (lane & ~(blockDim.x - 1));
}

// What the team wrote to memory is seen by all of it behind this.
__device__ inline void team_sync() {
    if (blockDim.x <= 32) {
        __syncwarp(team_mask());
    } else {
        __syncthreads();
    }
}

struct Sum {
    template <class T>
    static __device__ inline T join(T x, T y) { return x + y; }
};

struct Greatest {
    static __device__ inline real join(real x, real y) { return math::greatest(x, y); }
};

// The numbers of all threads of a team joined, in an order that only the team's size decides; all of it gets the result.
template <class How, class T>
__device__ inline T team_reduce(T x) {
    const unsigned mask = team_mask();
    for (unsigned offset = (blockDim.x < 32 ? blockDim.x : 32) / 2; offset > 0; offset /= 2)
        x = How::join(x, __shfl_xor_sync(mask, x, offset));
    if (blockDim.x <= 32) return x;
    __shared__ T part[32];
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    x = part[0];
    for (unsigned k = 1; k < blockDim.x / 32; ++k) x = How::join(x, part[k]);
    __syncthreads();  // the next reduction writes there
    return x;
}

// The row to whose list element `e` belongs: the last one that begins at or before it and is not empty.
__device__ inline integer row_of_element(const integer* boundaries, integer rows, integer e) {
    integer low = 0, high = rows;  // boundaries[low] <= e < boundaries[high]
    while (high - low > 1) {
        const integer middle = (low + high) / 2;
        if (boundaries[middle] <= e) low = middle; else high = middle;
    }
    return low;
}

// ---- values of up to four dimensions, by a thread for each element ------------------------------------------------------
//
// Dimensions are given first to last, the first being the one whose elements lie next to each other. The rows of an
// operand lie at offsets[r] + place, or at r * stride + place where `offsets` is null (with a stride of 0, one row is
// for all).

#define OPERAND(x) const real *x, const integer *x##_offsets, integer x##_place, integer x##_stride
#define ROW_OF(x, r) (x + x##_place + (x##_offsets ? x##_offsets[r] : (r) * x##_stride))
#define FOUR(type, n) type n##0, type n##1, type n##2, type n##3
#define GIVEN(n) n##0, n##1, n##2, n##3

// The place, by strides, of the element with number `i` in a value of sizes n.
__device__ inline integer place_of(int i, FOUR(int, n), FOUR(integer, stride)) {
    integer place = i % n0 * stride0;
    i /= n0;
    place += i % n1 * stride1;
    i /= n1;
    return place + i % n2 * stride2 + i / n2 * stride3;
}

// Row and number of the element that a thread is for, in rows of `size` elements.
#define ROW_AND_ELEMENT(r, i, size)                                             \
    const integer thread = integer(blockIdx.x) * blockDim.x + threadIdx.x;      \
    const integer r = thread / (size);                                          \
    const int i = int(thread % (size));                                         \
    if (r >= rows) return
