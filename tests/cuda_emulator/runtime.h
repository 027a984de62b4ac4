// What a compiled module and the runtime say to each other. No header of the system is included: modules compile faster.
#pragma once

using size_t = __SIZE_TYPE__;

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct uint3 {
    unsigned x, y, z;
};

extern "C" uint3 threadIdx, blockIdx;
extern "C" dim3 blockDim, gridDim;

namespace emulator {

// One kernel of a module: what a launch needs to know of it.
struct Kernel {
    const char *name;
    const char *types;          // one letter a parameter: p pointer, i and l integers of 32 and 64 bits, f, d; ? others
    void (*call)(void **args);  // runs one thread
    int most_threads;           // of __launch_bounds__; 1024 without
    char *shared, *shared_end;  // the module's static shared memory
};

enum Vote { NONE, ANY, ALL, COUNT };  // what a barrier of the block computes from its threads' predicates

}  // namespace emulator

constexpr size_t EMULATOR_DYNAMIC_SHARED = 48 << 10;
extern "C" char emulator_dynamic_shared[EMULATOR_DYNAMIC_SHARED];  // where `extern __shared__` arrays begin

// Where a thread waits for others; `line` is that of the source.
extern "C" int emulator_barrier(emulator::Vote vote, int predicate, int line);
extern "C" unsigned emulator_ballot(unsigned mask, int predicate, int line);
extern "C" unsigned long long emulator_shuffle(unsigned mask, unsigned long long value, int source, int line);
extern "C" unsigned emulator_lane();
extern "C" [[noreturn]] void emulator_trap(int line);
extern "C" unsigned long long emulator_clock();
