// Operations on whole buffers: the optimizer, norms, averages and conversions.
//
// Threads of a fixed grid take every n-th value, so that sums depend on the grid only.

#define EACH(i, n)                                                            \
    for (offset i = (offset)blockIdx.x * blockDim.x + threadIdx.x; i < (n); \
         i += (offset)gridDim.x * blockDim.x)

// AdamW (Loshchilov & Hutter 2019), with the order of operations of torch.optim.AdamW:
//   p <- p keep, with keep = 1 - lr decay
//   m <- beta1 m + rest1 g        v <- beta2 v + rest2 g^2, with rest = 1 - beta rounded once
//   p <- p - step m / (sqrt(v) / root + eps), with step = lr / (1 - beta1^t), root = sqrt(1 - beta2^t)
// g is scale times `gradient`. `bad`, one number a block, counts new values p and v that are not finite.
// Without `write` only `bad` is written, so that a step with a bad value can change nothing.
extern "C" __global__ void __launch_bounds__(256)
    adamw(float* values, float* first, float* second, const float* gradient, int* bad, offset n,
          float scale, float keep, float beta1, float rest1, float beta2, float rest2, float step,
          float root, float eps, int write) {
    int count = 0;
    EACH(i, n) {
        float g = gradient[i] * scale;
        float m = beta1 * first[i] + rest1 * g;
        float v = beta2 * second[i] + rest2 * (g * g);
        float p = values[i] * keep - step * m / (sqrtf(v) / root + eps);
        // 0 times any other value is no number.
        count += !(p * 0 == 0 && v * 0 == 0);
        if (write) {
            values[i] = p;
            first[i] = m;
            second[i] = v;
        }
    }
    count = block_sum(count);
    if (threadIdx.x == 0) bad[blockIdx.x] = count;
}

// The sum of squares of a block's values, which the host adds in their order.
extern "C" __global__ void __launch_bounds__(256) sum_squares(const float* x, double* sums, offset n) {
    double sum = 0;
    EACH(i, n) sum += (double)x[i] * x[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// x <- x + weight (towards - x)
extern "C" __global__ void __launch_bounds__(256)
    interpolate(float* x, const float* towards, offset n, float weight) {
    EACH(i, n) x[i] += weight * (towards[i] - x[i]);
}

// out = scale x, rounded.
extern "C" __global__ void __launch_bounds__(256)
    round_values(const float* x, act* out, offset n, float scale) {
    EACH(i, n) store(out, i, x[i] * scale);
}

extern "C" __global__ void __launch_bounds__(256) widen_values(const act* x, float* out, offset n) {
    EACH(i, n) out[i] = load(x, i);
}
