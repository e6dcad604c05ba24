// What all kernels share.
//
// The text is CUDA C for NVRTC, which needs no header, and C++17 for the emulator of the tests, which
// defines HONE_EMULATED and supplies what is CUDA's own. No kernel uses atomics, and every sum has a fixed
// order, so that equal inputs give equal bits.
//
// `act` is the type of weights and of activations that enter and leave matrix products: bf16, or float
// with HONE_F32, by which tests tell errors from rounding. All arithmetic is in float.

#ifndef HONE_EMULATED
struct bf16 {
    unsigned short bits;
};

__device__ inline float widen(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }

__device__ inline bf16 narrow(float x) {
    bf16 rounded;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded.bits) : "f"(x));
    return rounded;
}

#define SHARED(type, name, count) __shared__ type name[count]
#endif

#ifdef HONE_F32
typedef float act;
#else
typedef bf16 act;
#endif

typedef long long offset;

#define LOWEST (-3.402823466e38f)

__device__ inline float load(const float* x, offset i) { return x[i]; }
__device__ inline float load(const bf16* x, offset i) { return widen(x[i]); }
__device__ inline void store(float* x, offset i, float value) { x[i] = value; }
__device__ inline void store(bf16* x, offset i, float value) { x[i] = narrow(value); }

// The sum over groups of `lanes` neighbouring threads, in each of them.
template <class T>
__device__ inline T lanes_sum(T x, int lanes) {
    for (int mask = 1; mask < lanes; mask *= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
    return x;
}

__device__ inline float lanes_max(float x, int lanes) {
    for (int mask = 1; mask < lanes; mask *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, mask));
    return x;
}

// The sum over the block, in each thread. Blocks are of whole warps.
template <class T>
__device__ T block_sum(T x) {
    SHARED(T, parts, 32);
    x = lanes_sum(x, 32);
    // All threads have read the result of an earlier call.
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    T sum = 0;
    for (int i = 0; i < (int)blockDim.x / 32; i++) sum += parts[i];
    return sum;
}

__device__ inline float block_max(float x) {
    SHARED(float, parts, 32);
    x = lanes_max(x, 32);
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    for (int i = 0; i < (int)blockDim.x / 32; i++) x = fmaxf(x, parts[i]);
    return x;
}
