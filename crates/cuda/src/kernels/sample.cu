// Tokens drawn from rows of logits.

struct Sample {
    // -1 if the logits make no distribution.
    int id;
    float logp;
};

__device__ inline double token_weight(float logit, float most, double inverse) {
    return exp(((double)logit - most) * inverse);
}

// The least number of a warp, in each lane.
__device__ inline int lanes_least(int x) {
    for (int mask = 1; mask < 32; mask *= 2) x = min(x, __shfl_xor_sync(0xffffffffu, x, mask));
    return x;
}

// x = softcap tanh(x / softcap)
extern "C" __global__ void __launch_bounds__(256) cap_logits(float* x, offset n, float softcap) {
    for (offset i = (offset)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (offset)gridDim.x * blockDim.x)
        x[i] = softcap * tanhf(x[i] / softcap);
}

// The token at which the running sum of weights exp((x - max) / T) passes u times their total, and the
// logarithm of its probability, in the double precision of hone-engine's `TokenSampler`. A block computes a
// sample: of the row rows[blockIdx.x] of the logits, with {1 / T, u} in `draws`. With 0 in place of 1 / T the token is
// the first with the greatest logit, and T is 1.
//
// Each warp adds the weights of a range of tokens. The warp in whose range the sum passes goes through its
// range again.
extern "C" __global__ void __launch_bounds__(512)
    sample_rows(const float* logits, const int* rows, const double* draws, Sample* samples, int vocab) {
    SHARED(double, sums, 32);
    SHARED(int, greatest, 32);
    logits += (offset)rows[blockIdx.x] * vocab;
    bool is_greedy = draws[2 * blockIdx.x] == 0;
    double inverse = is_greedy ? 1 : draws[2 * blockIdx.x];
    float most = LOWEST;
    int bad = 0;
    for (int i = threadIdx.x; i < vocab; i += blockDim.x) {
        // True for what is no number, too.
        if (!(logits[i] <= -LOWEST)) bad = 1;
        most = fmaxf(most, logits[i]);
    }
    most = block_max(most);
    bad = block_sum(bad);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    int range = (vocab + blockDim.x - 1) / blockDim.x * 32;
    int begin = min(warp * range, vocab), end = min(begin + range, vocab);
    double sum = 0;
    int first = vocab;
    for (int i = begin + lane; i < end; i += 32) {
        sum += token_weight(logits[i], most, inverse);
        if (logits[i] == most) first = min(first, i);
    }
    sum = lanes_sum(sum, 32);
    first = lanes_least(first);
    if (lane == 0) sums[warp] = sum, greatest[warp] = first;
    __syncthreads();
    double total = 0;
    for (int i = 0; i < warps; i++) total += sums[i], first = min(first, greatest[i]);
    if (bad || !(total > 0) || is_greedy) {
        // The weight of the greatest is 1.
        Sample sample = {first, (float)log(1 / total)};
        if (threadIdx.x == 0) samples[blockIdx.x] = bad || !(total > 0) ? Sample{-1, 0} : sample;
        return;
    }
    // The last range with weights, if rounding leaves the sum below the target.
    double target = draws[2 * blockIdx.x + 1] * total, before = 0, start = 0;
    int chosen = 0;
    for (int i = 0; i < warps && before <= target; i++) {
        if (sums[i] > 0) chosen = i, start = before;
        before += sums[i];
    }
    if (warp != chosen) return;
    int found = vocab, last = -1;
    for (int first = begin; first < end && found == vocab; first += 32) {
        int i = first + lane;
        double weight = i < end ? token_weight(logits[i], most, inverse) : 0, inside = weight, all = weight;
        if (weight > 0) last = i;
        for (int mask = 1; mask < 32; mask *= 2) {
            double other = __shfl_xor_sync(0xffffffffu, all, mask);
            if (lane & mask) inside += other;
            all += other;
        }
        if (start + all > target) found = lanes_least(weight > 0 && start + inside > target ? i : vocab);
        start += all;
    }
    if (found == vocab) found = -lanes_least(-last);
    if (lane == 0) {
        double weight = token_weight(logits[found], most, inverse);
        samples[blockIdx.x] = Sample{found, (float)log(weight / total)};
    }
}
