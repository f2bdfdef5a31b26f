// A row's attention in parts, and what they are together: four dimensions a thread. A part leaves its sum of values in
// `partial`, float32 [rows, KV_HEADS, DIM], its reference and the sum of its weights in `extents`, [rows, KV_HEADS, 2].

constexpr int TOGETHER = 16;  // parts that are read at once: to read one takes long, to read many not much longer

struct Part {
    float top, total, sum[4];

    __device__ __forceinline__ void add(const Part& other) {
        const float higher = fmaxf(top, other.top), shrink = power_of_2(top - higher), grow = power_of_2(other.top - higher);
        total = total * shrink + other.total * grow;
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] = sum[i] * shrink + other.sum[i] * grow;
        top = higher;
    }

    __device__ __forceinline__ void write(u16* out) const {
        const float over = 1.0f / (total > 0.0f ? total : 1.0f);
        const u32 x[2] = {two(sum[0] * over, sum[1] * over), two(sum[2] * over, sum[3] * over)};
        store_global(out, x);
    }
};

// Dimensions d to d + 3 of all parts, always in their order. Rows count KV heads; the next part lies `apart` behind.
__device__ __forceinline__ Part parts_at(const float* partial, const float* extents, long long first, int apart, int parts,
                                         int d) {
    Part all = {-1.0e30f};
    for (int begin = 0; begin < parts; begin += TOGETHER) {
        Part some[TOGETHER];
#pragma unroll
        for (int j = 0; j < TOGETHER; ++j) {
            // Beyond the last one the last one again, which then does not count: no branch between loads.
            const int part = begin + j < parts ? begin + j : parts - 1;
            const long long row = first + static_cast<long long>(part) * apart;
            from_others(extents + row * 2, some[j].top, some[j].total);
            from_others(partial + row * DIM + d, some[j].sum);
        }
#pragma unroll
        for (int j = 0; j < TOGETHER; ++j) {
            if (begin + j < parts) all.add(some[j]);
        }
    }
    return all;
}
