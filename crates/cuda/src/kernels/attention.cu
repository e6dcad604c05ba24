// Causal attention: over the packed sequences of a training pass, with gradients, and over pages of cached
// keys and values.
//
// The forward pass saves the logarithm of every softmax's sum (lse), and the backward pass recomputes the
// probabilities from it (Dao 2023, "FlashAttention-2", algorithms 1 and 2). With s = scale q k, or
// softcap tanh(scale q k / softcap), p = exp(s - lse), output o = sum p v and its gradient g:
//
//   dv = sum p g        ds = p (g v - g o) [1 - (s / softcap)^2]        dq = scale sum ds k
//                                                                       dk = scale sum ds q
//
// HEAD_DIM, a multiple of 8, is a macro, so that tiles have a constant size. A block of THREADS computes a
// tile of TILE rows against tiles of TILE columns: LANES neighbouring threads share RUN rows, and a lane takes
// every eighth column. In the backward pass by keys, rows are keys and columns are queries. Tiles are small
// enough for 48 KB of shared memory, which every device has. Launch bounds name four blocks a multiprocessor,
// because ptxas spills registers for more of them otherwise.

const int THREADS = 128;
const int LANES = 8;
const int TILE = HEAD_DIM > 128 ? 16 : 32;
const int COLUMNS = TILE / LANES;
const int VALUES = HEAD_DIM / LANES;
// Two values more, so that rows start in different banks.
const int STRIDE = HEAD_DIM + 2;
// Positions of a page of keys and values.
const int PAGE = 16;
// Positions that one block of `attention_decode` reads.
const int SPLIT = 256;

struct Options {
    float scale;
    // 0 if there is none.
    float softcap;
    // A query attends to this number of last positions; all if 0.
    int window;
};

// Where the key at a position of a sequence is: the row of k and v.
struct TokenRows {
    const int* tokens;
    __device__ int at(int position) const { return tokens[position]; }
};

struct PageRows {
    const int* pages;
    __device__ int at(int position) const { return pages[position / PAGE] * PAGE + position % PAGE; }
};

// The rows `first .. first + TILE` of a list.
template <class Rows>
__device__ void load_tile(act* tile, const act* from, int stride, const Rows& rows, int first, int count) {
    for (int i = threadIdx.x; i < TILE * HEAD_DIM; i += THREADS) {
        int row = i / HEAD_DIM, d = i % HEAD_DIM;
        float value = row < count ? load(from, (offset)rows.at(first + row) * stride + d) : 0;
        store(tile, row * STRIDE + d, value);
    }
}

// Consecutive rows, `first .. first + count` of `from`.
struct AllRows {
    __device__ int at(int row) const { return row; }
};

template <int RUN>
struct Scores {
    float of[RUN][COLUMNS];
};

__device__ inline int lane() { return threadIdx.x % LANES; }

// The first of this thread's rows.
template <int RUN>
__device__ int own_row() {
    return threadIdx.x / LANES * RUN;
}

// Products of this thread's rows with its columns.
template <int RUN>
__device__ Scores<RUN> products(const act* rows, const act* columns) {
    Scores<RUN> sums = {};
    rows += own_row<RUN>() * STRIDE;
    for (int d = 0; d < HEAD_DIM; d++) {
        float column[COLUMNS];
        for (int j = 0; j < COLUMNS; j++) column[j] = load(columns, (lane() + j * LANES) * STRIDE + d);
        for (int i = 0; i < RUN; i++) {
            float row = load(rows, i * STRIDE + d);
            for (int j = 0; j < COLUMNS; j++) sums.of[i][j] += row * column[j];
        }
    }
    return sums;
}

// sums += weights times the columns' rows, for this thread's rows and its values of a head.
template <int RUN>
__device__ void add_weighted(float (&sums)[RUN][VALUES], const float* weights, const act* columns) {
    weights += own_row<RUN>() * (TILE + 1);
    for (int column = 0; column < TILE; column++) {
        for (int c = 0; c < VALUES; c++) {
            float value = load(columns, column * STRIDE + lane() + c * LANES);
            for (int i = 0; i < RUN; i++) sums[i][c] += weights[i * (TILE + 1) + column] * value;
        }
    }
}

template <int RUN>
__device__ void keep_weights(float* weights, const Scores<RUN>& scores) {
    for (int i = 0; i < RUN; i++)
        for (int j = 0; j < COLUMNS; j++)
            weights[(own_row<RUN>() + i) * (TILE + 1) + lane() + j * LANES] = scores.of[i][j];
}

// A score from a product, and the derivative by the product.
__device__ inline float score(float product, const Options& options, float* derivative) {
    float s = product * options.scale;
    *derivative = options.scale;
    if (options.softcap == 0) return s;
    float t = tanhf(s / options.softcap);
    *derivative *= 1 - t * t;
    return options.softcap * t;
}

__device__ inline bool is_visible(int query, int key, const Options& options) {
    return key <= query && (options.window == 0 || query - key < options.window);
}

// The tile of keys with the first position that the query at `position` attends to. Tiles of keys begin at
// multiples of TILE, so that the bits of a row do not depend on the other rows of its tile.
__device__ inline int first_tile(int position, const Options& options) {
    return options.window == 0 ? 0 : max(0, position + 1 - options.window) / TILE * TILE;
}

// The softmax over all keys so far, for this thread's rows, and its sum of values.
template <int RUN>
struct Softmax {
    float most[RUN];
    float total[RUN];
    float out[RUN][VALUES];
};

// Attention of queries in the first rows of a tile to the keys at positions `from .. to`. Row i is at
// `position + i * step`. Keys from `to` on are 0, and no row sees them: `to` follows the last query, or ends a
// tile of keys.
template <int RUN, class Rows>
__device__ Softmax<RUN> attend(const act* queries, const act* k, const act* v, int stride, const Rows& rows,
                               int from, int to, int position, int step, const Options& options) {
    SHARED(act, keys, TILE * STRIDE);
    SHARED(act, values, TILE * STRIDE);
    SHARED(float, weights, TILE * (TILE + 1));
    Softmax<RUN> softmax = {};
    for (int i = 0; i < RUN; i++) softmax.most[i] = LOWEST;
    for (int first = from; first < to; first += TILE) {
        // All threads are done with the last tile.
        __syncthreads();
        load_tile(keys, k, stride, rows, first, to - first);
        load_tile(values, v, stride, rows, first, to - first);
        __syncthreads();
        Scores<RUN> scores = products<RUN>(queries, keys);
        // Without it ptxas keeps the loop, and puts the arrays into local memory.
        #pragma unroll
        for (int i = 0; i < RUN; i++) {
            int query = position + (own_row<RUN>() + i) * step;
            bool visible[COLUMNS];
            float most = softmax.most[i], sum = 0, derivative;
            for (int j = 0; j < COLUMNS; j++) {
                int key = first + lane() + j * LANES;
                visible[j] = is_visible(query, key, options);
                scores.of[i][j] = score(scores.of[i][j], options, &derivative);
                if (visible[j]) most = fmaxf(most, scores.of[i][j]);
            }
            most = lanes_max(most, LANES);
            for (int j = 0; j < COLUMNS; j++) {
                scores.of[i][j] = visible[j] ? expf(scores.of[i][j] - most) : 0;
                sum += scores.of[i][j];
            }
            float shrink = expf(softmax.most[i] - most);
            softmax.most[i] = most;
            softmax.total[i] = softmax.total[i] * shrink + lanes_sum(sum, LANES);
            for (int c = 0; c < VALUES; c++) softmax.out[i][c] *= shrink;
        }
        keep_weights(weights, scores);
        __syncthreads();
        add_weighted<RUN>(softmax.out, weights, values);
    }
    return softmax;
}

// Queries of a tile at consecutive positions: {row of the first, number, sequence, position of the first}.
// The sequence names where its keys are: the first number of its list of tokens, or its row of page numbers.
struct QueryTile {
    int row, count, sequence, position;
};

template <class Rows>
__device__ void attend_tile(const act* q, const act* k, const act* v, act* out, float* lse,
                            const QueryTile& tile, const Rows& rows, int heads, int group, int q_stride,
                            int kv_stride, const Options& options) {
    SHARED(act, queries, TILE * STRIDE);
    int head = blockIdx.y, key_head = head / group;
    load_tile(queries, q + (offset)tile.row * q_stride + head * HEAD_DIM, q_stride, AllRows(), 0, tile.count);
    int from = first_tile(tile.position, options), to = tile.position + tile.count;
    const int RUN = TILE * LANES / THREADS;
    Softmax<RUN> softmax = attend<RUN>(queries, k + key_head * HEAD_DIM, v + key_head * HEAD_DIM, kv_stride,
                                       rows, from, to, tile.position, 1, options);
    for (int i = 0; i < RUN; i++) {
        if (own_row<RUN>() + i >= tile.count) continue;
        offset row = ((offset)tile.row + own_row<RUN>() + i) * heads + head;
        for (int c = 0; c < VALUES; c++)
            store(out, row * HEAD_DIM + lane() + c * LANES, softmax.out[i][c] / softmax.total[i]);
        if (lse && lane() == 0) lse[row] = softmax.most[i] + logf(softmax.total[i]);
    }
}

// The output [tokens, heads, HEAD_DIM] and lse [tokens, heads]; blockIdx is (tile, head). `tokens` are lists
// of the tokens of each sequence.
extern "C" __global__ void __launch_bounds__(128, 4)
    attention_forward(const act* q, const act* k, const act* v, act* out, float* lse, const QueryTile* tiles,
                      const int* tokens, int heads, int group, int q_stride, int kv_stride, float scale,
                      float softcap, int window) {
    QueryTile tile = tiles[blockIdx.x];
    TokenRows rows = {tokens + tile.sequence};
    attend_tile(q, k, v, out, lse, tile, rows, heads, group, q_stride, kv_stride,
                Options{scale, softcap, window});
}

// The same for parts of prompts, whose keys and values are in pages [page, position, key head, HEAD_DIM].
extern "C" __global__ void __launch_bounds__(128, 4)
    attention_prefill(const act* q, const act* k, const act* v, act* out, const QueryTile* tiles,
                      const int* pages, int pages_of_sequence, int heads, int group, int q_stride,
                      float scale, float softcap, int window) {
    QueryTile tile = tiles[blockIdx.x];
    PageRows rows = {pages + (offset)tile.sequence * pages_of_sequence};
    attend_tile(q, k, v, out, (float*)0, tile, rows, heads, group, q_stride, heads / group * HEAD_DIM,
                Options{scale, softcap, window});
}

// A part of the attention of one token of each sequence, whose own key is in its page already: for each part
// of SPLIT positions, head and sequence the values [sequence, head, part, HEAD_DIM], which are not divided by
// the softmax's sum, and {maximum, sum} of the softmax. blockIdx is (sequence, key head, part). The rows of a
// tile are the query heads of a key head, at most 16.
extern "C" __global__ void __launch_bounds__(128, 4)
    attention_decode(const act* q, const act* k, const act* v, float* values, float* sums,
                     const int* lengths, const int* pages, int pages_of_sequence, int heads, int group,
                     int q_stride, float scale, float softcap, int window) {
    SHARED(act, queries, TILE * STRIDE);
    int sequence = blockIdx.x, key_head = blockIdx.y, part = blockIdx.z, parts = gridDim.z;
    int length = lengths[sequence];
    if (part * SPLIT >= length) return;
    Options options = {scale, softcap, window};
    PageRows rows = {pages + (offset)sequence * pages_of_sequence};
    load_tile(queries, q + (offset)sequence * q_stride + key_head * group * HEAD_DIM, HEAD_DIM, AllRows(), 0,
              group);
    int from = max(part * SPLIT, first_tile(length - 1, options)), to = min(part * SPLIT + SPLIT, length);
    Softmax<1> softmax = attend<1>(queries, k + key_head * HEAD_DIM, v + key_head * HEAD_DIM,
                                   heads / group * HEAD_DIM, rows, from, to, length - 1, 0, options);
    int row = own_row<1>();
    if (row >= group) return;
    offset at = ((offset)sequence * heads + key_head * group + row) * parts + part;
    for (int c = 0; c < VALUES; c++) values[at * HEAD_DIM + lane() + c * LANES] = softmax.out[0][c];
    if (lane() == 0) {
        sums[2 * at] = softmax.most[0];
        sums[2 * at + 1] = softmax.total[0];
    }
}

// The output [sequence, head, HEAD_DIM] from its parts, added in their order; blockIdx is (sequence, head).
extern "C" __global__ void __launch_bounds__(128, 4)
    attention_join(const float* values, const float* sums, const int* lengths, act* out, int parts) {
    offset row = (offset)blockIdx.x * gridDim.y + blockIdx.y;
    int count = (lengths[blockIdx.x] + SPLIT - 1) / SPLIT;
    sums += 2 * row * parts;
    float most = LOWEST, total = 0;
    for (int part = 0; part < count; part++) most = fmaxf(most, sums[2 * part]);
    for (int part = 0; part < count; part++) total += sums[2 * part + 1] * expf(sums[2 * part] - most);
    for (int d = threadIdx.x; d < HEAD_DIM; d += THREADS) {
        float sum = 0;
        for (int part = 0; part < count; part++)
            sum += values[(row * parts + part) * HEAD_DIM + d] * expf(sums[2 * part] - most);
        store(out, row * HEAD_DIM + d, sum / total);
    }
}

// Writes rows of keys and values to their places in the pages, `page * PAGE + position in the page`; rows
// with a negative place are not written. blockIdx.x is the row.
extern "C" __global__ void __launch_bounds__(128, 4)
    write_pages(const act* k, const act* v, const int* places, act* k_pages, act* v_pages, int width,
                int kv_stride) {
    int place = places[blockIdx.x];
    if (place < 0) return;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        k_pages[(offset)place * width + i] = k[(offset)blockIdx.x * kv_stride + i];
        v_pages[(offset)place * width + i] = v[(offset)blockIdx.x * kv_stride + i];
    }
}

// delta [tokens, heads] = g o, for the backward pass. A warp computes one head of one token.
extern "C" __global__ void __launch_bounds__(128, 4)
    attention_delta(const act* out, const act* grad, float* delta, int rows) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    float sum = 0;
    for (int d = threadIdx.x % 32; d < HEAD_DIM; d += 32)
        sum += load(out, (offset)row * HEAD_DIM + d) * load(grad, (offset)row * HEAD_DIM + d);
    sum = lanes_sum(sum, 32);
    if (threadIdx.x % 32 == 0) delta[row] = sum;
}

const int BACKWARD_RUN = TILE * LANES / THREADS;

// The gradient of q, in rows of `q_stride`; `grad` and `out` of the forward pass are [tokens, heads,
// HEAD_DIM]. blockIdx is (tile, head).
extern "C" __global__ void __launch_bounds__(128, 4)
    attention_backward_queries(const act* q, const act* k, const act* v, const act* grad, const float* lse,
                               const float* delta, act* dq, const QueryTile* tiles, const int* tokens,
                               int heads, int group, int q_stride, int kv_stride, float scale, float softcap,
                               int window) {
    SHARED(act, queries, TILE * STRIDE);
    SHARED(act, grads, TILE * STRIDE);
    SHARED(act, keys, TILE * STRIDE);
    SHARED(act, values, TILE * STRIDE);
    SHARED(float, weights, TILE * (TILE + 1));
    const int RUN = BACKWARD_RUN;
    QueryTile tile = tiles[blockIdx.x];
    TokenRows rows = {tokens + tile.sequence};
    Options options = {scale, softcap, window};
    int head = blockIdx.y, column = head / group * HEAD_DIM;
    offset q_at = (offset)tile.row * q_stride + head * HEAD_DIM;
    offset out_at = (offset)tile.row * heads + head;
    load_tile(queries, q + q_at, q_stride, AllRows(), 0, tile.count);
    load_tile(grads, grad + out_at * HEAD_DIM, heads * HEAD_DIM, AllRows(), 0, tile.count);
    float sums[RUN][VALUES] = {};
    int to = tile.position + tile.count;
    for (int first = first_tile(tile.position, options); first < to; first += TILE) {
        __syncthreads();
        load_tile(keys, k + column, kv_stride, rows, first, to - first);
        load_tile(values, v + column, kv_stride, rows, first, to - first);
        __syncthreads();
        Scores<RUN> scores = products<RUN>(queries, keys), weighted = products<RUN>(grads, values);
        for (int i = 0; i < RUN; i++) {
            // Rows that do not exist are not written.
            int row = min(own_row<RUN>() + i, tile.count - 1);
            offset at = out_at + row * heads;
            for (int j = 0; j < COLUMNS; j++) {
                int key = first + lane() + j * LANES;
                float derivative, s = score(scores.of[i][j], options, &derivative);
                bool visible = is_visible(tile.position + row, key, options);
                float ds = expf(s - lse[at]) * (weighted.of[i][j] - delta[at]) * derivative;
                scores.of[i][j] = visible ? ds : 0;
            }
        }
        keep_weights(weights, scores);
        __syncthreads();
        add_weighted<RUN>(sums, weights, keys);
    }
    for (int i = 0; i < RUN; i++)
        for (int c = 0; c < VALUES && own_row<RUN>() + i < tile.count; c++)
            store(dq, q_at + (own_row<RUN>() + i) * q_stride + lane() + c * LANES, sums[i][c]);
}

// Consecutive tokens as keys: {first token, number, range of the list of tokens that may attend to them}.
struct KeyTile {
    int token, count, begin, end;
};

// The gradients of k and v, in rows of `kv_stride`. `queries_of` lists, for each tile of keys, tokens that may
// attend to them, and `positions` are those of all tokens. blockIdx is (tile, key head).
extern "C" __global__ void __launch_bounds__(128, 4)
    attention_backward_keys(const act* q, const act* k, const act* v, const act* grad, const float* lse,
                            const float* delta, act* dk, act* dv, const KeyTile* tiles,
                            const int* queries_of, const int* positions, int heads, int group, int q_stride,
                            int kv_stride, float scale, float softcap, int window) {
    SHARED(act, queries, TILE * STRIDE);
    SHARED(act, grads, TILE * STRIDE);
    SHARED(act, keys, TILE * STRIDE);
    SHARED(act, values, TILE * STRIDE);
    SHARED(float, weights, TILE * (TILE + 1));
    SHARED(float, score_grads, TILE * (TILE + 1));
    const int RUN = BACKWARD_RUN;
    KeyTile tile = tiles[blockIdx.x];
    TokenRows rows = {queries_of};
    Options options = {scale, softcap, window};
    offset at = (offset)tile.token * kv_stride + blockIdx.y * HEAD_DIM;
    load_tile(keys, k + at, kv_stride, AllRows(), 0, tile.count);
    load_tile(values, v + at, kv_stride, AllRows(), 0, tile.count);
    float dk_sums[RUN][VALUES] = {}, dv_sums[RUN][VALUES] = {};
    for (int head = blockIdx.y * group; head < ((int)blockIdx.y + 1) * group; head++) {
        for (int first = tile.begin; first < tile.end; first += TILE) {
            __syncthreads();
            load_tile(queries, q + head * HEAD_DIM, q_stride, rows, first, tile.end - first);
            load_tile(grads, grad + head * HEAD_DIM, heads * HEAD_DIM, rows, first, tile.end - first);
            __syncthreads();
            Scores<RUN> scores = products<RUN>(keys, queries), weighted = products<RUN>(values, grads);
            for (int j = 0; j < COLUMNS; j++) {
                int index = first + lane() + j * LANES;
                bool exists = index < tile.end;
                int token = queries_of[exists ? index : tile.begin];
                offset row = (offset)token * heads + head;
                for (int i = 0; i < RUN; i++) {
                    int key = own_row<RUN>() + i;
                    bool visible = exists &&
                                   is_visible(positions[token], positions[tile.token] + key, options);
                    float derivative, s = score(scores.of[i][j], options, &derivative);
                    float p = visible ? expf(s - lse[row]) : 0;
                    scores.of[i][j] = p;
                    weighted.of[i][j] = p * (weighted.of[i][j] - delta[row]) * derivative;
                }
            }
            keep_weights(weights, scores);
            keep_weights(score_grads, weighted);
            __syncthreads();
            add_weighted<RUN>(dv_sums, weights, grads);
            add_weighted<RUN>(dk_sums, score_grads, queries);
        }
    }
    for (int i = 0; i < RUN; i++)
        for (int c = 0; c < VALUES && own_row<RUN>() + i < tile.count; c++) {
            offset to = at + (own_row<RUN>() + i) * kv_stride + lane() + c * LANES;
            store(dk, to, dk_sums[i][c]);
            store(dv, to, dv_sums[i][c]);
        }
}
