// Log-probabilities and entropies of target tokens from rows of logits, and the gradients of the logits.
//
// A block computes one row. If softcap is not 0, the logits are softcap tanh(x / softcap) of the values x
// in memory, and gradients are those of x.

__device__ inline float capped(float x, float softcap) {
    return softcap != 0 ? softcap * tanhf(x / softcap) : x;
}

// stats = [ln p[target], entropy] per row. With z = (x - max) / T and S = sum e^z, the entropy is
// ln S - sum e^z z / S, a sum without cancellation as z <= 0.
extern "C" __global__ void __launch_bounds__(512)
    token_stats(const float* logits, const int* targets, const float* temperatures, float* stats,
                int vocab, float softcap) {
    logits += (offset)blockIdx.x * vocab;
    float inverse = 1 / temperatures[blockIdx.x], most = LOWEST;
    for (int i = threadIdx.x; i < vocab; i += blockDim.x) most = fmaxf(most, capped(logits[i], softcap));
    most = block_max(most);
    float sum = 0, mean = 0;
    for (int i = threadIdx.x; i < vocab; i += blockDim.x) {
        float z = (capped(logits[i], softcap) - most) * inverse, e = expf(z);
        sum += e;
        // e z is 0 where e is 0, even if z is minus infinity.
        if (e > 0) mean += e * z;
    }
    sum = block_sum(sum);
    mean = block_sum(mean);
    if (threadIdx.x == 0) {
        float target = capped(logits[targets[blockIdx.x]], softcap);
        stats[2 * blockIdx.x] = (target - most) * inverse - logf(sum);
        stats[2 * blockIdx.x + 1] = logf(sum) - mean / sum;
    }
}

// Gradients of the logits from those of the statistics, `seeds` [rows, 2]:
// d ln p_k / d x_j = (1[j = k] - p_j) / T and d H / d x_j = -p_j (ln p_j + H) / T.
extern "C" __global__ void __launch_bounds__(512)
    token_stats_backward(const float* logits, const int* targets, const float* temperatures,
                         const float* stats, const float* seeds, act* grad, int vocab, float softcap) {
    logits += (offset)blockIdx.x * vocab;
    grad += (offset)blockIdx.x * vocab;
    int target = targets[blockIdx.x];
    float inverse = 1 / temperatures[blockIdx.x], entropy = stats[2 * blockIdx.x + 1];
    float log_sum = capped(logits[target], softcap) * inverse - stats[2 * blockIdx.x];
    float of_logp = seeds[2 * blockIdx.x], of_entropy = seeds[2 * blockIdx.x + 1];
    for (int i = threadIdx.x; i < vocab; i += blockDim.x) {
        float x = capped(logits[i], softcap), logp = x * inverse - log_sum, p = expf(logp);
        float g = (i == target ? of_logp : 0) - of_logp * p;
        if (p > 0) g -= of_entropy * p * (logp + entropy);
        if (softcap != 0) g *= 1 - x / softcap * (x / softcap);
        store(grad, i, g * inverse);
    }
}
