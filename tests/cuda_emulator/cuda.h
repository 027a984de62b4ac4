// CUDA C for g++: what kernels may use of the language's built-in names, as NVRTC offers them without any header.
//
// `__global__` and `__shared__` are missing here: build.py replaces them in the preprocessed text.
#pragma once
#include "runtime.h"

#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __restrict__ __restrict
#define __align__(n) __attribute__((aligned(n)))
#define __CUDACC__ 1
#define __CUDA_ARCH__ 750

constexpr int warpSize = 32;

// ---- Vector types, with CUDA's alignments.

#define VECTORS(T, NAME, ALIGN2, ALIGN4)                                                     \
    struct __align__(sizeof(T)) NAME##1 { T x; };                                            \
    struct __align__(ALIGN2) NAME##2 { T x, y; };                                            \
    struct NAME##3 { T x, y, z; };                                                           \
    struct __align__(ALIGN4) NAME##4 { T x, y, z, w; };                                      \
    inline NAME##1 make_##NAME##1(T x) { return {x}; }                                       \
    inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }                               \
    inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
VECTORS(float, float, 8, 16)
VECTORS(double, double, 16, 16)
VECTORS(int, int, 8, 16)
VECTORS(long long, longlong, 16, 16)
VECTORS(unsigned long long, ulonglong, 16, 16)
VECTORS(unsigned char, uchar, 2, 4)
#undef VECTORS
struct uint1 { unsigned x; };
struct __align__(8) uint2 { unsigned x, y; };
struct __align__(16) uint4 { unsigned x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float3 make_float3(float x, float y, float z) { return {x, y, z}; }
inline double3 make_double3(double x, double y, double z) { return {x, y, z}; }
inline int3 make_int3(int x, int y, int z) { return {x, y, z}; }

// ---- Bits of one type read as another.

namespace emulator {
template <class To, class From> inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "types of one size");
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}
}  // namespace emulator

inline int __float_as_int(float x) { return emulator::bits<int>(x); }
inline unsigned __float_as_uint(float x) { return emulator::bits<unsigned>(x); }
inline float __int_as_float(int x) { return emulator::bits<float>(x); }
inline float __uint_as_float(unsigned x) { return emulator::bits<float>(x); }
inline long long __double_as_longlong(double x) { return emulator::bits<long long>(x); }
inline double __longlong_as_double(long long x) { return emulator::bits<double>(x); }
inline double __hiloint2double(int hi, int lo) {
    return emulator::bits<double>((unsigned long long)(unsigned)hi << 32 | (unsigned)lo);
}
inline int __double2loint(double x) { return (int)emulator::bits<long long>(x); }
inline int __double2hiint(double x) { return (int)(emulator::bits<long long>(x) >> 32); }

// ---- Mathematics: C's functions, also under their C++ names for float, and CUDA's own.

#define UNARY(NAME)                                     \
    extern "C" double NAME(double) noexcept;            \
    extern "C" float NAME##f(float) noexcept;           \
    inline float NAME(float x) { return NAME##f(x); }
#define BINARY(NAME)                                    \
    extern "C" double NAME(double, double) noexcept;    \
    extern "C" float NAME##f(float, float) noexcept;    \
    inline float NAME(float x, float y) { return NAME##f(x, y); }
UNARY(acos) UNARY(acosh) UNARY(asin) UNARY(asinh) UNARY(atan) UNARY(atanh) UNARY(cbrt) UNARY(ceil) UNARY(cos) UNARY(cosh)
UNARY(erf) UNARY(erfc) UNARY(exp) UNARY(exp2) UNARY(expm1) UNARY(fabs) UNARY(floor) UNARY(lgamma) UNARY(log)
UNARY(log10) UNARY(log1p) UNARY(log2) UNARY(nearbyint) UNARY(rint) UNARY(round) UNARY(sin) UNARY(sinh) UNARY(sqrt)
UNARY(tan) UNARY(tanh) UNARY(tgamma) UNARY(trunc)
BINARY(atan2) BINARY(copysign) BINARY(fdim) BINARY(fmax) BINARY(fmin) BINARY(fmod) BINARY(hypot) BINARY(nextafter)
BINARY(pow) BINARY(remainder)
#undef UNARY
#undef BINARY
extern "C" double fma(double, double, double) noexcept;
extern "C" float fmaf(float, float, float) noexcept;
extern "C" double ldexp(double, int) noexcept;
extern "C" float ldexpf(float, int) noexcept;
inline float fma(float x, float y, float z) { return fmaf(x, y, z); }
inline float ldexp(float x, int n) { return ldexpf(x, n); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float rsqrtf(float x) { return (float)(1.0 / sqrt((double)x)); }
inline float rsqrt(float x) { return rsqrtf(x); }
inline float exp10f(float x) { return powf(10.0f, x); }
inline double exp10(double x) { return pow(10.0, x); }
inline void sincosf(float x, float *sine, float *cosine) { *sine = sinf(x), *cosine = cosf(x); }
inline void sincos(double x, double *sine, double *cosine) { *sine = sin(x), *cosine = cos(x); }

// Less precise on a GPU; a test that holds here holds there within the bounds that CUDA's manual states.
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return exp10f(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

// Rounded to nearest, and never contracted to fused operations.
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return rsqrtf(x); }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dsub_rn(double x, double y) { return x - y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __ddiv_rn(double x, double y) { return x / y; }
inline double __drcp_rn(double x) { return 1.0 / x; }
inline double __dsqrt_rn(double x) { return sqrt(x); }
inline double __fma_rn(double x, double y, double z) { return fma(x, y, z); }

inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isnan(double x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isinf(double x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline bool isfinite(double x) { return __builtin_isfinite(x); }
inline bool signbit(float x) { return __builtin_signbit(x); }
inline bool signbit(double x) { return __builtin_signbit(x); }

// A negative infinity or a NaN goes into an integer as 0 or the nearest bound, as in CUDA.
#define ROUNDED(NAME, TO, FROM, EXPRESSION, LOWEST, HIGHEST)               \
    inline TO NAME(FROM x) {                                               \
        if (__builtin_isnan(x)) return 0;                                  \
        FROM y = EXPRESSION;                                               \
        return y <= (FROM)LOWEST ? LOWEST : y >= (FROM)HIGHEST ? HIGHEST : (TO)y; \
    }
ROUNDED(__float2int_rn, int, float, rintf(x), (-__INT_MAX__ - 1), __INT_MAX__)
ROUNDED(__float2int_rz, int, float, truncf(x), (-__INT_MAX__ - 1), __INT_MAX__)
ROUNDED(__float2int_rd, int, float, floorf(x), (-__INT_MAX__ - 1), __INT_MAX__)
ROUNDED(__double2int_rn, int, double, rint(x), (-__INT_MAX__ - 1), __INT_MAX__)
ROUNDED(__double2int_rz, int, double, trunc(x), (-__INT_MAX__ - 1), __INT_MAX__)
ROUNDED(__float2ll_rn, long long, float, rintf(x), (-__LONG_LONG_MAX__ - 1), __LONG_LONG_MAX__)
ROUNDED(__double2ll_rn, long long, double, rint(x), (-__LONG_LONG_MAX__ - 1), __LONG_LONG_MAX__)
#undef ROUNDED
inline float __int2float_rn(int x) { return (float)x; }
inline float __uint2float_rn(unsigned x) { return (float)x; }
inline float __ll2float_rn(long long x) { return (float)x; }
inline float __ull2float_rn(unsigned long long x) { return (float)x; }
inline float __double2float_rn(double x) { return (float)x; }
inline double __int2double_rn(int x) { return x; }
inline double __ll2double_rn(long long x) { return (double)x; }
inline double __ull2double_rn(unsigned long long x) { return (double)x; }

#define MINMAX(T, R, LESS, MORE)                   \
    inline R min(T x, T y) { return LESS; }        \
    inline R max(T x, T y) { return MORE; }
MINMAX(int, int, x < y ? x : y, x < y ? y : x)
MINMAX(unsigned, unsigned, x < y ? x : y, x < y ? y : x)
MINMAX(long, long, x < y ? x : y, x < y ? y : x)
MINMAX(unsigned long, unsigned long, x < y ? x : y, x < y ? y : x)
MINMAX(long long, long long, x < y ? x : y, x < y ? y : x)
MINMAX(unsigned long long, unsigned long long, x < y ? x : y, x < y ? y : x)
MINMAX(float, float, fminf(x, y), fmaxf(x, y))
MINMAX(double, double, fmin(x, y), fmax(x, y))
#undef MINMAX
#define MIXED(T, U, R)                                            \
    inline R min(T x, U y) { return min((R)x, (R)y); }            \
    inline R max(T x, U y) { return max((R)x, (R)y); }            \
    inline R min(U x, T y) { return min((R)x, (R)y); }            \
    inline R max(U x, T y) { return max((R)x, (R)y); }
MIXED(int, unsigned, unsigned)
MIXED(float, double, double)
#undef MIXED
inline int abs(int x) { return x < 0 ? -x : x; }
inline long abs(long x) { return x < 0 ? -x : x; }
inline long long abs(long long x) { return x < 0 ? -x : x; }
inline long long llabs(long long x) { return abs(x); }
inline float abs(float x) { return fabsf(x); }
inline double abs(double x) { return fabs(x); }

// ---- Integers.

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __mulhi(int x, int y) { return (int)((long long)x * y >> 32); }
inline unsigned __umulhi(unsigned x, unsigned y) { return (unsigned)((unsigned long long)x * y >> 32); }
inline long long __mul64hi(long long x, long long y) { return (long long)((__int128)x * y >> 64); }
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
    return (unsigned long long)((unsigned __int128)x * y >> 64);
}
inline unsigned __brev(unsigned x) {
    unsigned reversed = 0;
    for (int bit = 0; bit < 32; bit++) reversed |= (x >> bit & 1u) << (31 - bit);
    return reversed;
}
inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned n) {
    return (unsigned)((((unsigned long long)hi << 32 | lo) << (n & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned n) {
    return (unsigned)(((unsigned long long)hi << 32 | lo) >> (n & 31));
}

// ---- Memory.

template <class T> inline T __ldg(const T *p) { return *p; }
template <class T> inline T __ldcg(const T *p) { return *p; }
template <class T> inline T __ldcs(const T *p) { return *p; }
template <class T> inline void __stcg(T *p, T value) { *p = value; }
template <class T> inline void __stcs(T *p, T value) { *p = value; }
inline void __threadfence() {}
inline void __threadfence_block() {}

// Threads are switched only where they wait for one another, so that any other code is atomic as it is.
namespace emulator {
template <class T> inline T exchange(T *p, T value) {
    T old = *p;
    *p = value;
    return old;
}
}  // namespace emulator
#define ATOMIC(NAME, T, NEW)                                              \
    inline T NAME(T *p, T value) { return emulator::exchange(p, (T)(NEW)); }
#define INTEGER_ATOMICS(T)                                                \
    ATOMIC(atomicAdd, T, *p + value)                                      \
    ATOMIC(atomicMin, T, value < *p ? value : *p)                         \
    ATOMIC(atomicMax, T, value > *p ? value : *p)                         \
    ATOMIC(atomicAnd, T, *p & value)                                      \
    ATOMIC(atomicOr, T, *p | value)                                       \
    ATOMIC(atomicXor, T, *p ^ value)                                      \
    ATOMIC(atomicExch, T, value)                                          \
    inline T atomicCAS(T *p, T compare, T value) { return emulator::exchange(p, *p == compare ? value : *p); }
INTEGER_ATOMICS(unsigned)
INTEGER_ATOMICS(unsigned long long)
inline int atomicAdd(int *p, int value) { return emulator::exchange(p, (int)((unsigned)*p + (unsigned)value)); }
ATOMIC(atomicMin, int, value < *p ? value : *p)
ATOMIC(atomicMax, int, value > *p ? value : *p)
ATOMIC(atomicMin, long long, value < *p ? value : *p)
ATOMIC(atomicMax, long long, value > *p ? value : *p)
ATOMIC(atomicAnd, int, *p & value)
ATOMIC(atomicOr, int, *p | value)
ATOMIC(atomicXor, int, *p ^ value)
ATOMIC(atomicExch, int, value)
ATOMIC(atomicSub, int, (unsigned)*p - (unsigned)value)
ATOMIC(atomicSub, unsigned, *p - value)
ATOMIC(atomicAdd, float, *p + value)
ATOMIC(atomicAdd, double, *p + value)
ATOMIC(atomicExch, float, value)
inline int atomicCAS(int *p, int compare, int value) { return emulator::exchange(p, *p == compare ? value : *p); }
inline unsigned atomicInc(unsigned *p, unsigned limit) { return emulator::exchange(p, *p >= limit ? 0u : *p + 1); }
inline unsigned atomicDec(unsigned *p, unsigned limit) {
    return emulator::exchange(p, *p == 0 || *p > limit ? limit : *p - 1);
}
#undef ATOMIC
#undef INTEGER_ATOMICS

// ---- Waiting for other threads. `line` is where the kernel calls.

inline void __syncthreads(int line = __builtin_LINE()) { emulator_barrier(emulator::NONE, 0, line); }
inline int __syncthreads_count(int predicate, int line = __builtin_LINE()) {
    return emulator_barrier(emulator::COUNT, predicate, line);
}
inline int __syncthreads_and(int predicate, int line = __builtin_LINE()) {
    return emulator_barrier(emulator::ALL, predicate, line);
}
inline int __syncthreads_or(int predicate, int line = __builtin_LINE()) {
    return emulator_barrier(emulator::ANY, predicate, line);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, int line = __builtin_LINE()) { emulator_ballot(mask, 0, line); }
inline unsigned __ballot_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
    return emulator_ballot(mask, predicate, line);
}
inline int __any_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
    return emulator_ballot(mask, predicate, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
    return emulator_ballot(mask, !predicate, line) == 0;
}

namespace emulator {
template <class T> inline T shuffled(unsigned mask, T value, int source, int line) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
    unsigned long long word = 0;
    __builtin_memcpy(&word, &value, sizeof value);
    word = emulator_shuffle(mask, word, source, line);
    __builtin_memcpy(&value, &word, sizeof value);
    return value;
}
}  // namespace emulator

// A lane that would read beyond its part of `width` lanes gets its own value, as PTX's shfl says.
template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, int line = __builtin_LINE()) {
    int first = (int)emulator_lane() & ~(width - 1);
    return emulator::shuffled(mask, value, first + (source & (width - 1)), line);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, int line = __builtin_LINE()) {
    int lane = (int)emulator_lane(), source = lane - (int)delta;
    return emulator::shuffled(mask, value, source >= (lane & ~(width - 1)) ? source : lane, line);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, int line = __builtin_LINE()) {
    int lane = (int)emulator_lane(), source = lane + (int)delta;
    return emulator::shuffled(mask, value, source <= (lane | (width - 1)) ? source : lane, line);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, int line = __builtin_LINE()) {
    int lane = (int)emulator_lane(), source = lane ^ lanes;
    return emulator::shuffled(mask, value, source <= (lane | (width - 1)) ? source : lane, line);
}

inline long long clock64() { return (long long)emulator_clock(); }
inline int clock() { return (int)emulator_clock(); }
inline void __nanosleep(unsigned) {}
inline void __trap(int line = __builtin_LINE()) { emulator_trap(line); }

// ---- What build.py puts behind a module's text is made of these: a description of each `__global__` function.

namespace emulator {

template <class T> struct Letter { static constexpr char value = '?'; };
template <class T> struct Letter<T *> { static constexpr char value = 'p'; };
template <> struct Letter<int> { static constexpr char value = 'i'; };
template <> struct Letter<long> { static constexpr char value = 'l'; };
template <> struct Letter<long long> { static constexpr char value = 'l'; };
template <> struct Letter<float> { static constexpr char value = 'f'; };
template <> struct Letter<double> { static constexpr char value = 'd'; };
template <class T> struct Letter<const T> : Letter<T> {};

template <size_t... I> struct Indices {};
template <size_t N, size_t... I> struct Counted : Counted<N - 1, N - 1, I...> {};
template <size_t... I> struct Counted<0, I...> { using type = Indices<I...>; };

template <class F, F *function> struct Entry;
template <class... P, void (*function)(P...)> struct Entry<void(P...), function> {
    static constexpr char types[] = {Letter<P>::value..., 0};
    template <size_t... I> static void unpack(void **args, Indices<I...>) { function(*(P *)args[I]...); }
    static void call(void **args) { unpack(args, typename Counted<sizeof...(P)>::type()); }
};

extern "C" char __start_emulator_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_emulator_shared[] __attribute__((weak, visibility("hidden")));

template <class F, F *function> constexpr Kernel kernel(const char *name, int most_threads) {
    using E = Entry<F, function>;
    return {name, E::types, E::call, most_threads, __start_emulator_shared, __stop_emulator_shared};
}

}  // namespace emulator
