// Operations on rows of activations: embedding, norms, rotation and gated activations.
//
// The residual stream is float. Unless stated otherwise a block computes one row, which blockIdx.x names.

// x = scale * table[ids]
extern "C" __global__ void __launch_bounds__(256)
    embed(const int* ids, const act* table, float* x, int width, float scale) {
    const act* from = table + (offset)ids[blockIdx.x] * width;
    float* to = x + (offset)blockIdx.x * width;
    for (int i = threadIdx.x; i < width; i += blockDim.x) to[i] = load(from, i) * scale;
}

// out = the sum of rows of x for each row: of rows[starts[i]] to before rows[starts[i + 1]]. One row each gathers
// the inputs of the head, and the lists of the rows that a token predicts add their gradients.
extern "C" __global__ void __launch_bounds__(256)
    sum_rows(const act* x, const int* starts, const int* rows, act* out, int width) {
    int begin = starts[blockIdx.x], end = starts[blockIdx.x + 1];
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float sum = 0;
        for (int j = begin; j < end; j++) sum += load(x, (offset)rows[j] * width + i);
        store(out, (offset)blockIdx.x * width + i, sum);
    }
}

// 1 / sqrt(mean(x^2) + eps) from a thread's part of sum(x^2).
__device__ inline float norm_scale(float squares, int width, float eps) {
    return 1.0f / sqrtf(block_sum(squares) / width + eps);
}

// out = norm(x), after x was replaced by x + added in `sum`, unless `added` is null.
// norm(x) = x s (weight + weight_offset) with s = 1 / sqrt(mean(x^2) + eps).
extern "C" __global__ void __launch_bounds__(256)
    residual_norm(const float* x, const act* added, const float* weight, float* sum, act* out,
                  int width, float eps, float weight_offset) {
    offset row = (offset)blockIdx.x * width;
    float squares = 0;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float value = x[row + i];
        if (added) {
            value += load(added, row + i);
            sum[row + i] = value;
        }
        squares += value * value;
    }
    float s = norm_scale(squares, width, eps);
    const float* normed = added ? sum : x;
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        store(out, row + i, normed[row + i] * s * (weight[i] + weight_offset));
}

// sum = x + norm(out), for families that normalize the output of a layer's half.
extern "C" __global__ void __launch_bounds__(256)
    norm_residual(const float* x, const act* out, const float* weight, float* sum, int width, float eps,
                  float weight_offset) {
    offset row = (offset)blockIdx.x * width;
    float squares = 0;
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        squares += load(out, row + i) * load(out, row + i);
    float s = norm_scale(squares, width, eps);
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        sum[row + i] = x[row + i] + load(out, row + i) * s * (weight[i] + weight_offset);
}

// A row of the gradient of norm(x) from that of its output, g: s (h - x s^2 mean(h x)) with
// h = g (weight + weight_offset). Calls write(i, value).
template <class X, class G, class Write>
__device__ void norm_row_backward(const X* x, const G* g, const float* weight, int width, float eps,
                                  float weight_offset, Write write) {
    float squares = 0, products = 0;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float value = load(x, i);
        squares += value * value;
        products += load(g, i) * (weight[i] + weight_offset) * value;
    }
    float s = norm_scale(squares, width, eps);
    float shrink = block_sum(products) * s * s / width;
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        write(i, s * (load(g, i) * (weight[i] + weight_offset) - load(x, i) * shrink));
}

// grad += the gradient of x in `residual_norm` from that of `out`.
extern "C" __global__ void __launch_bounds__(256)
    residual_norm_backward(const float* x, const act* grad_out, const float* weight, float* grad,
                           int width, float eps, float weight_offset) {
    offset row = (offset)blockIdx.x * width;
    norm_row_backward(x + row, grad_out + row, weight, width, eps, weight_offset,
                      [&](int i, float dx) { grad[row + i] += dx; });
}

// grad_out = the gradient of `out` in `norm_residual` from that of the sum.
extern "C" __global__ void __launch_bounds__(256)
    norm_residual_backward(const act* out, const float* grad, const float* weight, act* grad_out,
                           int width, float eps, float weight_offset) {
    offset row = (offset)blockIdx.x * width;
    norm_row_backward(out + row, grad + row, weight, width, eps, weight_offset,
                      [&](int i, float dx) { store(grad_out, row + i, dx); });
}

// Heads of queries or keys: each has `dim` values, and the first 2 half are rotated in pairs (j, j + half)
// by the angle of the token's position; half is 0 in layers without rotation. A warp computes one head of
// one token. The tables of cosines and sines are [positions, half]. A lane reads and writes the same values,
// so a kernel may work in place.

// out = rotation(norm(x)); no norm if `weight` is null.
extern "C" __global__ void __launch_bounds__(128)
    rotate_heads(const act* x, const float* weight, const float* cosines, const float* sines,
                 const int* positions, act* out, int tokens, int heads, int dim, int half, int x_stride,
                 int out_stride, float eps, float weight_offset) {
    int index = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (index >= tokens * heads) return;
    int token = index / heads, head = index % heads;
    x += (offset)token * x_stride + head * dim;
    out += (offset)token * out_stride + head * dim;
    offset angle = (offset)positions[token] * half;
    float s = 1;
    if (weight) {
        float squares = 0;
        for (int i = lane; i < dim; i += 32) squares += load(x, i) * load(x, i);
        s = 1.0f / sqrtf(lanes_sum(squares, 32) / dim + eps);
    }
    // One lane has both values of a pair; the values that follow the pairs have no partner.
    for (int j = lane; j < dim - half; j += 32) {
        float second = load(x, j + half);
        if (weight) second *= s * (weight[j + half] + weight_offset);
        if (j < half) {
            float first = load(x, j), c = cosines[angle + j], d = sines[angle + j];
            if (weight) first *= s * (weight[j] + weight_offset);
            store(out, j, first * c - second * d);
            second = second * c + first * d;
        }
        store(out, j + half, second);
    }
}

// Replaces the gradient of the output of `rotate_heads` by that of x.
extern "C" __global__ void __launch_bounds__(128)
    rotate_heads_backward(const act* x, const float* weight, const float* cosines, const float* sines,
                          const int* positions, act* grad, int tokens, int heads, int dim, int half,
                          int x_stride, int grad_stride, float eps, float weight_offset) {
    int index = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (index >= tokens * heads) return;
    int token = index / heads, head = index % heads;
    x += (offset)token * x_stride + head * dim;
    grad += (offset)token * grad_stride + head * dim;
    offset angle = (offset)positions[token] * half;
    float squares = 0, products = 0, s = 1, shrink = 0;
    // The first round sums h x and x^2, the second writes.
    for (int round = weight ? 0 : 1; round < 2; round++) {
        for (int j = lane; j < dim - half; j += 32) {
            float first = 0, second = load(grad, j + half);
            if (j < half) {
                float a = load(grad, j), c = cosines[angle + j], d = sines[angle + j];
                first = a * c + second * d;
                second = second * c - a * d;
            }
            float x_first = 0, x_second = 0;
            if (weight) {
                second *= weight[j + half] + weight_offset;
                x_second = load(x, j + half);
                if (j < half) {
                    first *= weight[j] + weight_offset;
                    x_first = load(x, j);
                }
            }
            if (round == 0) {
                squares += x_first * x_first + x_second * x_second;
                products += first * x_first + second * x_second;
            } else {
                if (j < half) store(grad, j, s * (first - x_first * shrink));
                store(grad, j + half, s * (second - x_second * shrink));
            }
        }
        if (round == 0) {
            s = 1.0f / sqrtf(lanes_sum(squares, 32) / dim + eps);
            shrink = lanes_sum(products, 32) * s * s / dim;
        }
    }
}

// The activation's value and derivative: SiLU, or the approximation of GELU by a tanh.
__device__ inline float activation(float x, int gelu, float* derivative) {
    if (gelu) {
        const float root = 0.7978845608028654f, cubic = 0.044715f;
        float t = tanhf(root * x * (1 + cubic * x * x));
        *derivative = 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * root * (1 + 3 * cubic * x * x);
        return 0.5f * x * (1 + t);
    }
    float s = 1 / (1 + expf(-x));
    *derivative = s * (1 + x * (1 - s));
    return x * s;
}

// out [rows, width] = activation(gate) * up for rows [gate | up] of 2 width values.
extern "C" __global__ void __launch_bounds__(256)
    gated_activation(const act* gate_up, act* out, int width, int gelu) {
    gate_up += (offset)blockIdx.x * 2 * width;
    out += (offset)blockIdx.x * width;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float derivative;
        store(out, i, activation(load(gate_up, i), gelu, &derivative) * load(gate_up, width + i));
    }
}

// Replaces gate and up by their gradients from that of the output.
extern "C" __global__ void __launch_bounds__(256)
    gated_activation_backward(act* gate_up, const act* grad, int width, int gelu) {
    gate_up += (offset)blockIdx.x * 2 * width;
    grad += (offset)blockIdx.x * width;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float derivative, g = load(grad, i), up = load(gate_up, width + i);
        float value = activation(load(gate_up, i), gelu, &derivative);
        store(gate_up, i, g * up * derivative);
        store(gate_up, width + i, g * value);
    }
}
