// Runs CUDA C kernels on the processor, one block after the other: enough of CUDA for the texts in
// src/kernels, and a main function that runs one kernel on buffers from a file.
//
// The threads of a block are fibres, which change at barriers and shuffles only. What finds errors:
// - The first thread that can run does so, in ascending or descending order, so that a warp runs ahead of all
//   others until a barrier stops it. A result that depends on the order shows a missing barrier.
// - A barrier that not all threads reach, or that they reach in different lines, ends the program.
// - Shared memory is poisoned before each block, and its arrays check indices.
// - Each buffer ends at a page that cannot be accessed.
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#define HONE_EMULATED
#define __device__
#define __global__
#define __launch_bounds__(...)

using std::max;
using std::min;

struct Index {
    unsigned x, y, z;
};

static Index threadIdx, blockIdx, blockDim, gridDim;

[[noreturn]] static void fail(const std::string& what) {
    fprintf(stderr, "emulator: %s (block %u %u %u, thread %u)\n", what.c_str(), blockIdx.x, blockIdx.y,
            blockIdx.z, threadIdx.x);
    exit(1);
}

// bf16 as integers.

struct bf16 {
    unsigned short bits;
};

static float widen(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static bf16 narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return bf16{0x7fff};
    return bf16{(unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

// Shared memory: arrays that exist once, as blocks run one after the other.

struct SharedBytes {
    void* bytes;
    size_t size;
};

static std::vector<SharedBytes>& shared_arrays() {
    static std::vector<SharedBytes> all;
    return all;
}

template <class T, int COUNT>
struct SharedArray {
    T values[COUNT];
    SharedArray() {
        shared_arrays().push_back({values, sizeof values});
        memset((void*)values, 0xff, sizeof values);
    }
    operator T*() { return values; }
    T& operator[](long index) {
        if (index < 0 || index >= COUNT) fail("index " + std::to_string(index) + " of shared memory");
        return values[index];
    }
};

#define SHARED(type, name, count) static SharedArray<type, (count)> name

// Fibres and barriers.

struct Barrier {
    unsigned arrived = 0, generation = 0;
    int line = 0;
};

struct Warp {
    Barrier barrier;
    unsigned char slots[2][32][8];
};

struct Fibre {
    ucontext_t start;
    // Where it goes on: at a barrier, or with the next block.
    jmp_buf at;
    bool is_started, is_done;
    unsigned shuffles;
    // What it waits for: that the barrier has another generation.
    const Barrier* barrier;
    unsigned generation;

    bool can_run() const { return !is_done && (!barrier || barrier->generation != generation); }
};

const size_t STACK = 256 << 10;
static std::vector<Fibre> fibres;
static std::vector<Warp> warps;
static Barrier block_barrier;
static unsigned current;
// No thread before this one, in the order of the run, can run.
static unsigned scanned;
static bool is_descending;
static ucontext_t scheduler_start;
static jmp_buf scheduler;
static void (*run_thread)(void*);
static void* run_argument;

static unsigned position(unsigned thread) { return is_descending ? blockDim.x - 1 - thread : thread; }

// Runs a thread of every block: a new fibre costs system calls.
static void fibre_main() {
    for (;;) {
        run_thread(run_argument);
        fibres[current].is_done = true;
        if (_setjmp(fibres[current].at) == 0) _longjmp(scheduler, 1);
    }
}

// Lets the scheduler choose who runs, once the barrier has another generation than this one.
__attribute__((noinline)) static void pause_at(const Barrier& barrier, unsigned generation) {
    Fibre& fibre = fibres[current];
    fibre.barrier = &barrier;
    fibre.generation = generation;
    if (_setjmp(fibre.at) == 0) _longjmp(scheduler, 1);
}

// `first` and the `threads` from it on wait for each other.
static void wait_at(Barrier& barrier, unsigned first, unsigned threads, int line) {
    if (barrier.arrived == 0) barrier.line = line;
    if (barrier.line != line) fail("threads wait in lines " + std::to_string(line) + " and " +
                                   std::to_string(barrier.line));
    unsigned generation = barrier.generation;
    if (++barrier.arrived == threads) {
        barrier.arrived = 0;
        barrier.generation++;
        scanned = min({scanned, position(first), position(first + threads - 1)});
    }
    pause_at(barrier, generation);
}

#define __syncthreads() wait_at(block_barrier, 0, blockDim.x, __LINE__)

template <class T>
static T shuffle_xor(T value, int mask, int line) {
    Warp& warp = warps[threadIdx.x / 32];
    // Two sets of slots: who still reads the last set has not passed the next barrier.
    auto& slots = warp.slots[fibres[current].shuffles++ % 2];
    unsigned lane = threadIdx.x % 32, first = threadIdx.x - lane;
    memcpy(slots[lane], &value, sizeof value);
    wait_at(warp.barrier, first, min(32u, blockDim.x - first), line);
    memcpy(&value, slots[lane ^ mask], sizeof value);
    return value;
}

#define __shfl_xor_sync(lanes, value, mask) shuffle_xor(value, mask, __LINE__)

static void run_block(bool descending) {
    unsigned threads = blockDim.x;
    static char* stacks = new char[1024 * STACK];
    if (fibres.size() < threads) fibres.resize(threads);
    is_descending = descending;
    scanned = 0;
    warps.assign((threads + 31) / 32, Warp());
    block_barrier = Barrier();
    for (auto& shared : shared_arrays()) memset(shared.bytes, 0xff, shared.size);
    for (unsigned i = 0; i < threads; i++) {
        fibres[i].is_done = false;
        fibres[i].shuffles = 0;
        fibres[i].barrier = nullptr;
    }
    // Threads come back to this place.
    _setjmp(scheduler);
    while (scanned < threads && !fibres[position(scanned)].can_run()) scanned++;
    if (scanned == threads) {
        for (unsigned i = 0; i < threads; i++)
            if (!fibres[i].is_done) fail("a barrier that not all threads reach");
        return;
    }
    current = position(scanned);
    threadIdx = {current, 0, 0};
    Fibre& fibre = fibres[current];
    if (fibre.is_started) _longjmp(fibre.at, 1);
    fibre.is_started = true;
    getcontext(&fibre.start);
    fibre.start.uc_stack.ss_sp = stacks + current * STACK;
    fibre.start.uc_stack.ss_size = STACK;
    fibre.start.uc_link = nullptr;
    makecontext(&fibre.start, fibre_main, 0);
    swapcontext(&scheduler_start, &fibre.start);
}

// Kernels with any arguments.

struct Argument {
    bool is_buffer;
    // The buffer, at the end of its pages, or the bytes of a number.
    char* bytes;
    size_t size;
};

template <class A>
struct Cast {
    static A of(const Argument& argument) {
        if (argument.is_buffer || argument.size != sizeof(A)) fail("a number of another size");
        A value;
        memcpy(&value, argument.bytes, sizeof value);
        return value;
    }
};

template <class T>
struct Cast<T*> {
    static T* of(const Argument& argument) {
        if (!argument.is_buffer) fail("a number instead of a buffer");
        if (argument.size % sizeof(T) != 0) fail("a buffer of a broken number of values");
        return argument.size == 0 ? nullptr : (T*)argument.bytes;
    }
};

static void run_grid(void (*thread)(void*), void* argument, bool descending) {
    run_thread = thread;
    run_argument = argument;
    unsigned blocks = gridDim.x * gridDim.y * gridDim.z;
    for (unsigned i = 0; i < blocks; i++) {
        unsigned b = descending ? blocks - 1 - i : i;
        blockIdx = {b % gridDim.x, b / gridDim.x % gridDim.y, b / gridDim.x / gridDim.y};
        run_block(descending);
    }
}

template <auto FUNCTION>
struct Launcher;

template <class... A, void (*FUNCTION)(A...)>
struct Launcher<FUNCTION> {
    template <size_t... I>
    static void call(std::vector<Argument>& arguments, std::index_sequence<I...>) {
        FUNCTION(Cast<A>::of(arguments[I])...);
    }
    template <size_t... I>
    static void call(void** arguments, std::index_sequence<I...>) {
        FUNCTION(*(A*)arguments[I]...);
    }
    // With checked arguments.
    static void launch(std::vector<Argument>& arguments, bool descending) {
        if (arguments.size() != sizeof...(A)) fail("another number of arguments");
        auto thread = [](void* arguments) {
            call(*(std::vector<Argument>*)arguments, std::index_sequence_for<A...>());
        };
        run_grid(thread, &arguments, descending);
    }
    // With pointers to the arguments, as the driver's function has them.
    static void launch_pointers(void** arguments) {
        auto thread = [](void* arguments) { call((void**)arguments, std::index_sequence_for<A...>()); };
        run_grid(thread, arguments, false);
    }
};

struct Kernel {
    void (*launch)(std::vector<Argument>& arguments, bool descending);
    void (*launch_pointers)(void** arguments);
};

// Defined after the kernels: a map of all of them.
#define KERNEL(name) {#name, {Launcher<name>::launch, Launcher<name>::launch_pointers}},
static const std::map<std::string, Kernel>& all_kernels();

static Kernel find_kernel(const std::string& name) {
    auto found = all_kernels().find(name);
    if (found == all_kernels().end()) fail("no kernel " + name);
    return found->second;
}

#ifdef HONE_MODULE
// What fake_cuda.cpp calls in a module.
extern "C" void hone_launch(const char* name, const unsigned* grid, unsigned threads, void** arguments) {
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {threads, 1, 1};
    find_kernel(name).launch_pointers(arguments);
}
#else
static char* before_forbidden_page(size_t size) {
    size_t page = 4096, pages = (size + page - 1) / page * page;
    char* start = (char*)mmap(nullptr, pages + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED || mprotect(start + pages, page, PROT_NONE) != 0) fail("no memory");
    return start + pages - size;
}

// The file has the name of the kernel, the three sizes of the grid, the threads of a block, the order, the
// number of arguments and for each of them whether it is a buffer, its size and its bytes; numbers have eight
// bytes. The buffers are written back.
int main(int count, char** names) {
    if (count != 2) fail("expected a file");
    std::ifstream in(names[1], std::ios::binary);
    auto number = [&] {
        uint64_t value = 0;
        in.read((char*)&value, 8);
        return value;
    };
    std::string name(number(), ' ');
    in.read(&name[0], name.size());
    gridDim.x = number(), gridDim.y = number(), gridDim.z = number();
    blockDim = {(unsigned)number(), 1, 1};
    bool descending = number();
    std::vector<Argument> arguments(number());
    for (auto& argument : arguments) {
        argument.is_buffer = number();
        argument.size = number();
        argument.bytes = before_forbidden_page(argument.size);
        in.read(argument.bytes, argument.size);
    }
    if (!in) fail("the file ends too early");
    in.close();
    find_kernel(name).launch(arguments, descending);
    std::ofstream out(names[1], std::ios::binary | std::ios::trunc);
    for (auto& argument : arguments)
        if (argument.is_buffer) out.write(argument.bytes, argument.size);
    return out.good() ? 0 : 1;
}
#endif
