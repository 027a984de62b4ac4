// Runs a kernel's grid on the CPU: blocks one after the other, the threads of a block as fibers of one CPU thread.
//
// A fiber is a stack. It runs one thread after the other until a thread has to wait; then the next thread, or one that
// waits no longer, goes on elsewhere. So a kernel without barriers is a plain loop, and with them every wait is real:
// the compiler and the threads see exactly what they would see of each other on a GPU between two barriers, in one of
// the possible orders. Which one is a matter of the seed.
#include "runtime.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;
alignas(256) char emulator_dynamic_shared[EMULATOR_DYNAMIC_SHARED];

namespace {

using emulator::Kernel;
using emulator::Vote;

constexpr unsigned WARP = 32, MOST_THREADS = 1024;
constexpr size_t STACK = 256 << 10;  // virtual memory; the pages that are touched count
constexpr unsigned char GARBAGE = 0xff;  // what memory holds that nobody has written: NaN in any type, or -1

// ---- Fibers.

struct Fiber {
#if defined(__x86_64__)
    void *sp = nullptr;
#else
    ucontext_t context;
#endif
    size_t number = 0;
    char *stack = nullptr;  // its lower end; null for the thread of the system that launches
    size_t size = 0;
    void *fake_stack = nullptr;  // AddressSanitizer's
};

#if defined(__x86_64__)
// Saves what a called function must keep, and returns on another stack. A system call for each switch, as
// swapcontext makes, would be most of the time of a kernel with barriers.
extern "C" void emulator_switch(void **from, void *to);
asm(R"(
    .text
    .type emulator_switch, @function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size emulator_switch, .-emulator_switch
)");
#endif

Fiber launcher;
std::vector<Fiber *> fibers, idle;

void fiber_main();

// The fiber begins anew when it is next switched to, whatever it was doing.
void prime(Fiber *fiber) {
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(fiber->stack, fiber->size);
#endif
#if defined(__x86_64__)
    // Tops of stacks that are a power of two apart would share a few sets of the cache.
    size_t offset = fiber->number % 16 * 256;
    void **top = reinterpret_cast<void **>(fiber->stack + fiber->size - offset);
    *--top = nullptr;  // where fiber_main would return to
    *--top = reinterpret_cast<void *>(fiber_main);
    for (int saved = 0; saved < 6; saved++) *--top = nullptr;
    fiber->sp = top;
#else
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack;
    fiber->context.uc_stack.ss_size = fiber->size;
    fiber->context.uc_link = nullptr;
    makecontext(&fiber->context, fiber_main, 0);
#endif
}

Fiber *new_fiber() {
    size_t page = sysconf(_SC_PAGESIZE);
    void *memory = mmap(nullptr, STACK + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        perror("emulator: no memory for a fiber's stack");
        _exit(1);
    }
    mprotect(memory, page, PROT_NONE);  // a stack that is too deep faults
    Fiber *fiber = new Fiber;
    fiber->stack = static_cast<char *>(memory) + page;
    fiber->size = STACK, fiber->number = fibers.size();
    fibers.push_back(fiber);
    prime(fiber);
    return fiber;
}

Fiber *idle_fiber() {
    if (idle.empty()) return new_fiber();
    Fiber *fiber = idle.back();
    idle.pop_back();
    return fiber;
}

void arrived(Fiber *self) {
#if defined(__SANITIZE_ADDRESS__)
    const void *bottom;
    size_t size;
    __sanitizer_finish_switch_fiber(self ? self->fake_stack : nullptr, &bottom, &size);
    if (!launcher.stack) launcher.stack = (char *)bottom, launcher.size = size;
#else
    (void)self;
#endif
}

void switch_fiber(Fiber *from, Fiber *to) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&from->fake_stack, to->stack, to->size);
#endif
#if defined(__x86_64__)
    emulator_switch(&from->sp, to->sp);
#else
    swapcontext(&from->context, &to->context);
#endif
    arrived(from);
}

// ---- The block that runs.

enum Waiting { NOTHING, BARRIER, VOTE, SHUFFLE };
const char *const WAITING[] = {"nothing", "__syncthreads", "a vote or __syncwarp", "a shuffle"};

struct Thread {
    uint3 index;
    unsigned lane, warp;
    Fiber *fiber;  // null before its first wait
    Waiting waiting;
    bool left;
    int line;
    unsigned mask;
    int source;               // the lane that a shuffle reads
    unsigned long long value, result;
};

struct Warp {
    Thread *threads;
    unsigned present, waiting;  // lanes that have not left; those that wait for others of the warp
};

struct Block {
    const Kernel *kernel;
    void **args;
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::vector<Thread *> ready;  // a ring of as many places as threads
    size_t first, waiting_ready;
    size_t left, at_barrier;
    int barrier_line;
    int tally;
    uint64_t random;  // state of the generator; 0 for the natural order
    bool failed;
    char *message;
    size_t message_size;
} block;

Thread *current;
Fiber *running;

uint64_t draw() {  // xorshift64 (Marsaglia 2003)
    uint64_t x = block.random;
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    return block.random = x;
}

void make_ready(Thread *thread) {
    thread->waiting = NOTHING;
    size_t place = block.first + block.waiting_ready++, size = block.ready.size();
    block.ready[place < size ? place : place - size] = thread;
}

Thread *next_ready() {
    if (block.waiting_ready == 0) return nullptr;
    size_t size = block.ready.size();
    Thread **first = &block.ready[block.first];
    if (block.random) {
        size_t place = block.first + draw() % block.waiting_ready;
        Thread **chosen = &block.ready[place < size ? place : place - size], *swapped = *first;
        *first = *chosen, *chosen = swapped;
    }
    if (++block.first == size) block.first = 0;
    block.waiting_ready--;
    return *first;
}

void take(Thread *thread) {
    current = thread;
    threadIdx = thread->index;
}

// Ends the launch with a message.
[[noreturn]] void fail(const char *format, ...) {
    int used = snprintf(block.message, block.message_size, "kernel %s, block (%u, %u, %u): ", block.kernel->name,
                        blockIdx.x, blockIdx.y, blockIdx.z);
    va_list rest;
    va_start(rest, format);
    vsnprintf(block.message + used, block.message_size - used, format, rest);
    va_end(rest);
    block.failed = true;
    switch_fiber(running, &launcher);
    __builtin_unreachable();
}

[[noreturn]] void fail_divergent() {
    Thread *waiting = nullptr;
    size_t waiting_count = 0;
    const char *others = "";
    for (Thread &t : block.threads) {
        if (t.left) continue;
        if (!waiting) waiting = &t;
        waiting_count++;
        if (t.waiting != waiting->waiting || t.line != waiting->line || t.mask != waiting->mask)
            others = ", others elsewhere";
    }
    char mask[32] = "";
    if (waiting->waiting != BARRIER) snprintf(mask, sizeof mask, " (mask %#x)", waiting->mask);
    fail("divergent: %zu of %zu threads have left, and %zu wait for them, thread (%u, %u, %u) at %s in line %d%s%s",
         block.left, block.threads.size(), waiting_count, waiting->index.x, waiting->index.y, waiting->index.z,
         WAITING[waiting->waiting], waiting->line, mask, others);
}

// The current thread waits; its fiber's stack stays as it is until the thread is taken again.
void wait() {
    Fiber *self = running;
    current->fiber = self;
    Thread *next = next_ready();
    if (!next) fail_divergent();
    take(next);
    if (next->fiber == self) return;
    running = next->fiber ? next->fiber : idle_fiber();
    switch_fiber(self, running);
}

void leave(Thread *thread);

void fiber_main() {
    arrived(nullptr);
    Fiber *self = running;
    for (;;) {
        block.kernel->call(block.args);
        leave(current);
        Thread *next = next_ready();
        if (next && !next->fiber) {
            take(next);
            continue;
        }
        if (!next && block.left < block.threads.size()) fail_divergent();
        idle.push_back(self);
        if (next) {
            take(next);
            running = next->fiber;
            switch_fiber(self, running);
        } else {
            switch_fiber(self, &launcher);
        }
    }
}

// Lets the lanes of a mask go on if all of them that have not left wait for one another; true if so.
bool meet(Warp &warp, unsigned mask) {
    unsigned lanes = mask & warp.present;
    if ((warp.waiting & lanes) != lanes) return false;
    Thread *first = nullptr;
    unsigned votes = 0;
    for (unsigned rest = lanes; rest; rest &= rest - 1) {
        Thread &t = warp.threads[__builtin_ctz(rest)];
        if (!first) first = &t;
        if (t.mask != mask) return false;
        if (t.waiting != first->waiting || t.line != first->line)
            fail("divergent: lanes of one warp wait for each other at %s in line %d and at %s in line %d",
                 WAITING[first->waiting], first->line, WAITING[t.waiting], t.line);
        if (t.waiting == VOTE && t.value) votes |= 1u << t.lane;
    }
    for (unsigned rest = lanes; rest; rest &= rest - 1) {
        Thread &t = warp.threads[__builtin_ctz(rest)];
        if (t.waiting == VOTE)
            t.result = votes;
        else if (t.source >= 0 && t.source < (int)WARP && lanes >> t.source & 1)
            t.result = warp.threads[t.source].value;
        else
            memset(&t.result, GARBAGE, sizeof t.result);  // undefined in CUDA
    }
    for (unsigned rest = lanes; rest; rest &= rest - 1) {
        Thread *t = &warp.threads[__builtin_ctz(rest)];
        if (t != current) make_ready(t);
    }
    warp.waiting &= ~lanes;
    return true;
}

unsigned long long meet_lanes(Waiting what, unsigned mask, unsigned long long value, int source, int line) {
    Thread *self = current;
    Warp &warp = block.warps[self->warp];
    if (!(mask >> self->lane & 1))
        fail("thread (%u, %u, %u), lane %u, is not in the mask %#x that it passes to %s in line %d", threadIdx.x,
             threadIdx.y, threadIdx.z, self->lane, mask, WAITING[what], line);
    self->waiting = what, self->mask = mask, self->value = value, self->source = source, self->line = line;
    warp.waiting |= 1u << self->lane;
    if (meet(warp, mask))
        self->waiting = NOTHING;
    else
        wait();
    return self->result;
}

// The thread has returned from the kernel: nobody waits for it any more, unless at a barrier, which is an error.
void leave(Thread *thread) {
    Warp &warp = block.warps[thread->warp];
    thread->left = true;
    block.left++;
    warp.present &= ~(1u << thread->lane);
    for (unsigned rest = warp.waiting; rest; rest &= rest - 1) {
        unsigned lane = __builtin_ctz(rest);
        if (warp.waiting >> lane & 1) meet(warp, warp.threads[lane].mask);
    }
}

#if defined(__SANITIZE_ADDRESS__)
// AddressSanitizer's report is about to end the process; the trace in it names the line.
void name_kernel(const char *) {
    fprintf(stderr, "out of bounds: kernel %s, block (%u, %u, %u), thread (%u, %u, %u)\n", block.kernel->name,
            blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z);
}
#endif

void start_block() {
    size_t count = block.threads.size();
    block.first = 0, block.waiting_ready = 0, block.left = 0, block.at_barrier = 0;
    for (Thread &t : block.threads) {
        t.fiber = nullptr, t.left = false;
        make_ready(&t);
    }
    for (size_t w = 0; w < block.warps.size(); w++) {
        size_t lanes = count - w * WARP;
        block.warps[w].present = lanes >= WARP ? ~0u : (1u << lanes) - 1;
        block.warps[w].waiting = 0;
    }
}

void make_threads(const unsigned size[3]) {
    size_t count = (size_t)size[0] * size[1] * size[2];
    block.threads.resize(count);
    block.ready.resize(count);
    block.warps.resize((count + WARP - 1) / WARP);
    Thread *t = block.threads.data();
    for (size_t w = 0; w < block.warps.size(); w++) block.warps[w].threads = t + w * WARP;
    unsigned n = 0;
    for (unsigned z = 0; z < size[2]; z++)
        for (unsigned y = 0; y < size[1]; y++)
            for (unsigned x = 0; x < size[0]; x++, n++) {
                t[n].index = {x, y, z};
                t[n].lane = n % WARP, t[n].warp = n / WARP;
            }
}

// No memset, and unchecked: AddressSanitizer has zones of its own between the arrays.
__attribute__((no_sanitize_address, optimize("no-tree-loop-distribute-patterns"))) void fill(char *begin, char *end) {
    uint64_t garbage = ~uint64_t(0);
    for (; begin + sizeof garbage <= end; begin += sizeof garbage) __builtin_memcpy(begin, &garbage, sizeof garbage);
    for (; begin < end; begin++) *begin = (char)GARBAGE;
}

}  // namespace

// ---- What kernels call.

int emulator_barrier(Vote vote, int predicate, int line) {
    if (block.at_barrier == 0)
        block.barrier_line = line, block.tally = vote == emulator::ALL;
    else if (line != block.barrier_line)
        fail("divergent: threads of the block wait at __syncthreads in line %d and in line %d", block.barrier_line, line);
    bool yes = predicate != 0;
    if (vote == emulator::ANY) block.tally |= yes;
    if (vote == emulator::ALL) block.tally &= yes;
    if (vote == emulator::COUNT) block.tally += yes;
    Thread *self = current;
    self->waiting = BARRIER, self->line = line, self->mask = 0;
    if (++block.at_barrier < block.threads.size()) {
        wait();
        return (int)self->result;
    }
    block.at_barrier = 0;
    for (Thread &t : block.threads) {
        t.result = block.tally;
        if (&t != self) make_ready(&t);
    }
    self->waiting = NOTHING;
    return block.tally;
}

unsigned emulator_ballot(unsigned mask, int predicate, int line) {
    return (unsigned)meet_lanes(VOTE, mask, predicate != 0, 0, line);
}

unsigned long long emulator_shuffle(unsigned mask, unsigned long long value, int source, int line) {
    return meet_lanes(SHUFFLE, mask, value, source, line);
}

unsigned emulator_lane() { return current->lane; }

void emulator_trap(int line) { fail("__trap in line %d", line); }

unsigned long long emulator_clock() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ull + now.tv_nsec;
}

// ---- What code compiled with -fsanitize=alignment,bounds,integer-divide-by-zero calls. On a GPU the first is an error,
// the others are silent; none is meant.

struct Place {
    const char *file;
    uint32_t line, column;
};

extern "C" void __ubsan_handle_type_mismatch_v1(Place *place, uintptr_t address) {
    fail("misaligned access to address %#zx in line %u", (size_t)address, place->line);
}
extern "C" void __ubsan_handle_out_of_bounds(Place *place, uintptr_t index) {
    fail("index %zd out of the bounds of an array in line %u", (ssize_t)index, place->line);
}
extern "C" void __ubsan_handle_divrem_overflow(Place *place, uintptr_t, uintptr_t) {
    fail("integer division by zero in line %u", place->line);
}

// ---- What the driver calls.

// Runs a grid; 0, or 1 with a message. Seed 0 is the natural order of threads and blocks.
extern "C" int emulator_launch(const Kernel *kernel, void **args, const unsigned grid[3], const unsigned size[3],
                               size_t shared, uint64_t seed, char *message, size_t message_size) {
    char *dynamic = emulator_dynamic_shared;
    block.kernel = kernel, block.args = args, block.failed = false;
    block.message = message, block.message_size = message_size;
    block.random = seed * 0x9e3779b97f4a7c15ull;
    gridDim = dim3(grid[0], grid[1], grid[2]), blockDim = dim3(size[0], size[1], size[2]);
    make_threads(size);
#if defined(__SANITIZE_ADDRESS__)
    __asan_set_error_report_callback(name_kernel);
    __asan_unpoison_memory_region(dynamic, shared);
    __asan_poison_memory_region(dynamic + shared, EMULATOR_DYNAMIC_SHARED - shared);
#endif
    uint64_t blocks = (uint64_t)grid[0] * grid[1] * grid[2];
    uint64_t begin = block.random ? draw() % blocks : 0;
    bool backwards = block.random && draw() >> 63;
    for (uint64_t n = 0; n < blocks && !block.failed; n++) {
        uint64_t b = (begin + (backwards ? blocks - n : n)) % blocks;
        blockIdx = {(unsigned)(b % grid[0]), (unsigned)(b / grid[0] % grid[1]), (unsigned)(b / grid[0] / grid[1])};
        fill(kernel->shared, kernel->shared_end);
        fill(dynamic, dynamic + shared);
        start_block();
        take(next_ready());
        running = idle_fiber();
        switch_fiber(&launcher, running);
    }
    if (block.failed) {
        idle.clear();
        for (Fiber *fiber : fibers) prime(fiber), idle.push_back(fiber);
    }
#if defined(__SANITIZE_ADDRESS__)
    __asan_set_error_report_callback(nullptr);
#endif
    return block.failed;
}

// The first zone, of `count` pairs of address and size, that holds another byte; -1 if there is none.
extern "C" int64_t emulator_find_damage(const int64_t (*zones)[2], size_t count, int byte) {
    for (size_t zone = 0; zone < count; zone++) {
        const unsigned char *begin = reinterpret_cast<const unsigned char *>(zones[zone][0]);
        if (zones[zone][1] && (begin[0] != byte || memcmp(begin, begin + 1, zones[zone][1] - 1))) return zone;
    }
    return -1;
}
