// Operations on whole buffers. Threads of a fixed grid take every n-th value.

#define EACH(i, n)                                                            \
    for (offset i = (offset)blockIdx.x * blockDim.x + threadIdx.x; i < (n); \
         i += (offset)gridDim.x * blockDim.x)

// out = scale x, rounded.
extern "C" __global__ void __launch_bounds__(256)
    round_values(const float* x, act* out, offset n, float scale) {
    EACH(i, n) store(out, i, x[i] * scale);
}
