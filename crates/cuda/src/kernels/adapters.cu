// Products with the adapters of rows that decode: each row names the slot of its adapter, or -1.
//
// All matrices of a slot are in one buffer; `slot_size` is the distance from a matrix to the same one of the
// next slot. Training and prompts use cuBLASLt, because many of their rows in turn have one adapter.

// low [rows, rank] = x A^T for A [rank, width]; rows without an adapter are left as they are. A warp computes
// one value; blockIdx.y is the row.
extern "C" __global__ void __launch_bounds__(128)
    adapter_down(const act* x, const act* a, const int* slots, act* low, int width, int rank,
                 offset slot_size) {
    int row = blockIdx.y, slot = slots[row], lane = threadIdx.x % 32;
    int r = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (slot < 0 || r >= rank) return;
    x += (offset)row * width;
    a += slot * slot_size + (offset)r * width;
    float sum = 0;
    for (int i = lane; i < width; i += 32) sum += load(x, i) * load(a, i);
    sum = lanes_sum(sum, 32);
    if (lane == 0) store(low, row * rank + r, sum);
}

// y += scale low B^T for B [outputs, rank]. A thread computes one output; blockIdx.y is the row.
extern "C" __global__ void __launch_bounds__(128)
    adapter_up(const act* low, const act* b, const int* slots, act* y, int outputs, int rank,
               offset slot_size, int low_stride, int y_stride, float scale) {
    int row = blockIdx.y, slot = slots[row], output = blockIdx.x * blockDim.x + threadIdx.x;
    if (slot < 0 || output >= outputs) return;
    low += (offset)row * low_stride;
    b += slot * slot_size + (offset)output * rank;
    float sum = 0;
    for (int r = 0; r < rank; r++) sum += load(low, r) * load(b, r);
    offset at = (offset)row * y_stride + output;
    store(y, at, load(y, at) + scale * sum);
}
