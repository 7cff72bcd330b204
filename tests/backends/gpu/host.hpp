// CUDA's words for a host compiler, so that it runs the very text that NVRTC compiles: each thread of a block is a
// context of its own, switched at barriers and shuffles; blocks run one after the other. Where a kernel has neither,
// its threads are plain calls.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include <ucontext.h>

#define __global__
#define __device__
#define __shared__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __restrict__ __restrict

struct Three { unsigned x, y, z; };
static Three threadIdx, blockIdx, blockDim, gridDim;

static inline float __uint_as_float(unsigned x) { float y; std::memcpy(&y, &x, 4); return y; }
static inline unsigned __float_as_uint(float x) { unsigned y; std::memcpy(&y, &x, 4); return y; }
static inline float __int_as_float(int x) { float y; std::memcpy(&y, &x, 4); return y; }
static inline float half_value(unsigned short bits) { _Float16 h; std::memcpy(&h, &bits, 2); return (float)h; }
static inline unsigned short half_bits(float x) {
    const _Float16 h = (_Float16)x;
    unsigned short bits;
    std::memcpy(&bits, &h, 2);
    return bits;
}

namespace host {

constexpr std::size_t STACK = 64 << 10;
constexpr unsigned MOST = 1024;

struct Thread {
    ucontext_t context;
    unsigned number;
    std::uint64_t blocks, warps;  // how many barriers of either kind it has come to
    bool over;
};

// of the launch that runs: every library has these names for itself, and a process loads many libraries
static std::vector<Thread> threads;
static char* stacks;
static ucontext_t scheduler;
static unsigned current, count;
static unsigned char slots[MOST][16];
static bool backwards, stuck;
static void (*body)(void*);
static void* argument;

static void become(unsigned number) {
    current = number;
    threadIdx = {number % blockDim.x, number / blockDim.x % blockDim.y, number / blockDim.x / blockDim.y};
}

static void yield() {
    Thread& own = threads[current];
    swapcontext(&own.context, &scheduler);
}

// waits until every thread of the range that still runs has come to as many barriers
template <std::uint64_t Thread::*COUNT> static void meet(unsigned first, unsigned end) {
    const std::uint64_t own = ++(threads[current].*COUNT);
    for (;;) {
        bool all = true;
        for (unsigned t = first; t < end; ++t) all = all && (threads[t].over || threads[t].*COUNT >= own);
        if (all || stuck) return;
        yield();
    }
}

static void entry() {
    body(argument);
    threads[current].over = true;
    swapcontext(&threads[current].context, &scheduler);
}

static std::uint64_t progress() {
    std::uint64_t total = 0;
    for (unsigned t = 0; t < count; ++t) total += threads[t].blocks + threads[t].warps + threads[t].over;
    return total;
}

static void run_block(bool switched) {
    if (!switched) {
        for (unsigned t = 0; t < count; ++t) {
            become(backwards ? count - 1 - t : t);
            body(argument);
        }
        return;
    }
    for (unsigned t = 0; t < count; ++t) {
        Thread& made = threads[t];
        made.blocks = made.warps = 0;
        made.over = false;
        getcontext(&made.context);
        made.context.uc_stack.ss_sp = &stacks[STACK * t];
        made.context.uc_stack.ss_size = STACK;
        made.context.uc_link = nullptr;
        makecontext(&made.context, entry, 0);
    }
    unsigned idle = 0;
    for (bool left = true; left;) {
        left = false;
        const std::uint64_t before = progress();
        for (unsigned t = 0; t < count; ++t) {
            const unsigned number = backwards ? count - 1 - t : t;
            if (threads[number].over) continue;
            left = true;
            become(number);
            swapcontext(&scheduler, &threads[number].context);
        }
        idle = progress() == before ? idle + 1 : 0;
        if (idle > 2) stuck = true;
    }
}

template <typename... A, std::size_t... N>
static void unpacked(void (*kernel)(A...), void** values, std::index_sequence<N...>) {
    kernel(*static_cast<A*>(values[N])...);
}

template <typename... A> struct Call {
    void (*kernel)(A...);
    void** values;
    static void run(void* self) {
        Call* call = static_cast<Call*>(self);
        unpacked(call->kernel, call->values, std::index_sequence_for<A...>());
    }
};

// 0, or 1 where threads wait at a barrier that others never come to
template <typename... A>
static int launch(void (*kernel)(A...), void** values, const unsigned* geometry, int switched, int reversed) {
    Call<A...> call{kernel, values};
    body = &Call<A...>::run;
    argument = &call;
    backwards = reversed;
    stuck = false;
    gridDim = {geometry[0], geometry[1], geometry[2]};
    blockDim = {geometry[3], geometry[4], geometry[5]};
    count = blockDim.x * blockDim.y * blockDim.z;
    if (switched) {
        threads.resize(count);
        stacks = static_cast<char*>(std::malloc(STACK * count));
    }
    const unsigned blocks = gridDim.x * gridDim.y * gridDim.z;
    for (unsigned b = 0; b < blocks && !stuck; ++b) {
        const unsigned number = backwards ? blocks - 1 - b : b;
        blockIdx = {number % gridDim.x, number / gridDim.x % gridDim.y, number / gridDim.x / gridDim.y};
        run_block(switched);
    }
    if (switched) {
        std::vector<Thread>().swap(threads);
        std::free(stacks);
    }
    return stuck;
}

}  // namespace host

static inline void __syncthreads() { host::meet<&host::Thread::blocks>(0, host::count); }

static inline void host_meet_warp() {
    const unsigned first = host::current / 32 * 32;
    host::meet<&host::Thread::warps>(first, first + 32 < host::count ? first + 32 : host::count);
}

template <typename T> static T host_shuffled(T x, unsigned lane) {
    std::memcpy(host::slots[host::current], &x, sizeof(T));
    host_meet_warp();
    T y = x;
    if (lane < 32 && host::current / 32 * 32 + lane < host::count)
        std::memcpy(&y, host::slots[host::current / 32 * 32 + lane], sizeof(T));
    host_meet_warp();
    return y;
}
template <typename T> static T __shfl_xor_sync(unsigned, T x, int mask) {
    return host_shuffled(x, (host::current % 32) ^ (unsigned)mask);
}
template <typename T> static T __shfl_up_sync(unsigned, T x, unsigned by) {
    const unsigned lane = host::current % 32;
    return host_shuffled(x, lane < by ? lane : lane - by);
}
template <typename T> static T __shfl_sync(unsigned, T x, int lane) { return host_shuffled(x, (unsigned)lane); }
static inline void __syncwarp(unsigned = ~0u) { host_meet_warp(); }
