// Σ over examples of g and g², where g is one example's weight gradient of a convolution (1 to 3 spatial dimensions):
//
//   g[o][run][e] = Σ over positions l of  gradient[o][l] · input[start(l) + start(run) + e]
//
// The input is repacked once to padded, channels-last order, so that what one position reads of a kernel row is one
// contiguous run; the output gradient to blocks of channels. A tile of some channels × some vectors of the run stays in
// registers over all positions of an example and is then added to Σ g and, squared, to Σ g²: g itself is never stored.
//
// Two parallelisations. By example, for few weights or many positions: every thread has its own sums and a part of the
// examples. By tile: everything is packed first, every thread takes a part of the tiles, and a tile's sums stay in
// registers over several examples. In both, the order of additions depends on the number of threads only.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace {

#if defined(__AVX512F__)
constexpr int BYTES = 64, WIDE = 8, THIN = 2;  // 32 registers: 8 × 3 sums, 3 inputs, a gradient; or 3 × 4 × 2 sums
#elif defined(__AVX__)
constexpr int BYTES = 32, WIDE = 4, THIN = 1;  // 16 registers
#elif defined(__aarch64__)
constexpr int BYTES = 16, WIDE = 8, THIN = 2;  // 32 registers
#else
constexpr int BYTES = 16, WIDE = 4, THIN = 1;
#endif
constexpr int MOST = 3;                         // vectors of a tile, by example
constexpr int NARROW = 4;                       // channels of a block, by tile
constexpr int64_t FEW_BYTES = 3 << 19;          // sums of a thread, by example: most of an L2 cache
constexpr int64_t MANY_POSITIONS = 384;         // enough to amortise sums that are not in that cache …
constexpr int64_t MOST_BYTES = int64_t(1) << 26;  // … up to this much for all threads
constexpr int64_t STRIP_BYTES = 24 << 10;       // inputs of several examples for one tile: half of an L1 cache
constexpr int64_t ALIGN = 64;

template <class T> struct Vec {
    static constexpr int L = BYTES / sizeof(T);
    typedef T type __attribute__((vector_size(BYTES)));
    typedef T loose __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));
    static type load(const T* p) { return *reinterpret_cast<const loose*>(p); }
    static void store(T* p, type v) { *reinterpret_cast<loose*>(p) = v; }
};

inline int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t rounded_up(int64_t a, int64_t b) { return divided_up(a, b) * b; }

// Filled by the Python side.
struct Geometry {
    int64_t batch, groups, channels, outputs;  // channels and outputs of one group
    int64_t in[3], out[3], kernel[3], stride[3], padding[3], dilation[3];
    int64_t x_example, x_channel, x_pixel;     // strides; pixels of an example are consecutive
    int64_t g_example, g_channel, g_pixel;
};

template <class T> struct Plan : Geometry {
    static constexpr int L = Vec<T>::L;
    bool by_example, whole_rows, exact;   // exact: packed sums have as many entries as the weight
    int block, most;                      // channels of a block, vectors of a tile at most
    int64_t pixels, positions, taps;
    int64_t size[3], spread;              // of the packed input: spatial sizes, entries an example
    int64_t runs, length, vectors, tiles; // of the kernel; entries, vectors and tiles of a run
    int64_t blocks, sums;                 // entries of one kind of sums of one group

    Plan(const Geometry& geometry, int threads) : Geometry(geometry) {
        pixels = in[0] * in[1] * in[2];
        positions = out[0] * out[1] * out[2];
        taps = kernel[0] * kernel[1] * kernel[2];
        for (int d = 0; d < 3; ++d) size[d] = (out[d] - 1) * stride[d] + dilation[d] * (kernel[d] - 1) + 1;
        whole_rows = dilation[2] == 1;
        runs = whole_rows ? kernel[0] * kernel[1] : taps;
        length = channels * (whole_rows ? kernel[2] : 1);
        vectors = divided_up(length, L);
        // A tile may read past the end of the last run: that memory must exist and be harmless.
        spread = rounded_up(size[0] * size[1] * size[2] * channels + vectors * L + L, ALIGN);
        const int64_t bytes = 2 * groups * outputs * runs * vectors * L * static_cast<int64_t>(sizeof(T));
        by_example = bytes <= FEW_BYTES || (positions >= MANY_POSITIONS && bytes * threads <= MOST_BYTES);
        block = by_example ? WIDE : NARROW;
        most = by_example || positions >= 24 ? MOST : THIN;
        tiles = divided_up(vectors, most);
        blocks = divided_up(outputs, block);
        sums = blocks * block * runs * vectors * L;
        exact = sums == outputs * channels * taps;
    }
    int64_t packed_gradient() const { return rounded_up(blocks * positions * block, ALIGN); }
    int64_t run_start(int64_t run) const {
        const int64_t column = whole_rows ? 0 : run % kernel[2], row = whole_rows ? run : run / kernel[2];
        const int64_t depth = row / kernel[1], height = row % kernel[1];
        return ((depth * dilation[0] * size[1] + height * dilation[1]) * size[2] + column * dilation[2]) * channels;
    }
    int64_t tile_start(int64_t tile) const { return tile * vectors / tiles; }  // as even as possible
    // Sums lie as [block][run][tile][channel of the block][vectors of the tile].
    int64_t sum_start(int64_t b, int64_t run, int64_t tile) const {
        return ((b * runs + run) * vectors + tile_start(tile)) * block * L;
    }
};

// -- repacking ------------------------------------------------------------------------------------------------------

// Transpose a square of vectors: log2(L) times, interleave the first half of the rows with the second.
template <class T> inline void transpose(typename Vec<T>::type* rows) {
    constexpr int L = Vec<T>::L;
#if defined(__GNUC__) && !defined(__clang__)
    using V = typename Vec<T>::type;
    typedef typename std::conditional<sizeof(T) == 4, int32_t, int64_t>::type Index;
    typedef Index Mask __attribute__((vector_size(BYTES)));
    Mask low, high;
    for (int i = 0; i < L; ++i) {
        low[i] = i / 2 + (i % 2) * L;
        high[i] = low[i] + L / 2;
    }
    V next[L];
#pragma GCC unroll 4
    for (int stage = 1; stage < L; stage *= 2) {
#pragma GCC unroll 16
        for (int i = 0; i < L / 2; ++i) {
            next[2 * i] = __builtin_shuffle(rows[i], rows[i + L / 2], low);
            next[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + L / 2], high);
        }
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) rows[i] = next[i];
    }
#else
    for (int i = 0; i < L; ++i)
        for (int j = 0; j < i; ++j) {
            const T kept = rows[i][j];
            rows[i][j] = rows[j][i];
            rows[j][i] = kept;
        }
#endif
}

// Entries [at, at + L) of `channels` channels, transposed: each vector holds the channels of one entry, then zeros.
template <class T>
inline void columns(const T* from, int64_t channel, int64_t at, int64_t channels, typename Vec<T>::type* rows) {
    constexpr int L = Vec<T>::L;
    if (channels >= L) {
#pragma GCC unroll 16
        for (int r = 0; r < L; ++r) rows[r] = Vec<T>::load(from + r * channel + at);
    } else {
        for (int r = 0; r < L; ++r)
            rows[r] = r < channels ? Vec<T>::load(from + r * channel + at) : typename Vec<T>::type{};
    }
    transpose<T>(rows);
}

// Copy one example and group of the input into padded memory; `places` maps pixels to offsets (-1: read by no position).
template <class T> void pack_input(const Plan<T>& p, const T* x, const int32_t* places, T* to) {
    using V = Vec<T>;
    constexpr int L = V::L;
    if (p.x_channel == 1) {
        for (int64_t i = 0; i < p.pixels; ++i)
            if (places[i] >= 0) std::memcpy(to + places[i], x + i * p.x_pixel, sizeof(T) * p.channels);
        return;
    }
    if (p.x_pixel != 1 || p.pixels < L) {
        for (int64_t i = 0; i < p.pixels; ++i)
            if (places[i] >= 0)
                for (int64_t c = 0; c < p.channels; ++c) to[places[i] + c] = x[c * p.x_channel + i * p.x_pixel];
        return;
    }
    // A vector may be longer than the remaining channels. It spills into padding, which gets zeros, or into entries that
    // get their own values later: hence the last channels first, and pixels in order.
    for (int64_t c = (p.channels - 1) / L * L; c >= 0; c -= L)
        for (int64_t i = 0; i < p.pixels; i += L) {
            const int64_t at = std::min(i, p.pixels - L);
            typename V::type rows[L];
            columns<T>(x + c * p.x_channel, p.x_channel, at, p.channels - c, rows);
            for (int64_t r = 0; r < L; ++r)
                if (places[at + r] >= 0) V::store(to + places[at + r] + c, rows[r]);
        }
}

// One example and group of the output gradient into blocks [position][channel of the block], `apart` entries from one
// block to the next, and each channel's sum for the bias.
template <class T, int BLOCK> void pack_gradient(const Plan<T>& p, const T* g, T* to, int64_t apart, T* bias) {
    using V = Vec<T>;
    constexpr int L = V::L, STEP = L < BLOCK ? L : BLOCK;
    if (p.g_pixel != 1 || p.positions < L) {
        for (int64_t o = 0; o < p.outputs; o += BLOCK) {
            const int64_t count = std::min<int64_t>(BLOCK, p.outputs - o);
            T some[BLOCK] = {0}, total[BLOCK] = {0};
            for (int64_t i = 0; i < p.positions; ++i) {
                for (int64_t b = 0; b < count; ++b) some[b] = g[(o + b) * p.g_channel + i * p.g_pixel];
                for (int b = 0; b < BLOCK; ++b) total[b] += some[b];
                std::memcpy(to + o / BLOCK * apart + i * BLOCK, some, sizeof(some));
            }
            std::copy(total, total + count, bias + o);
        }
        return;
    }
    for (int64_t o = 0; o < p.outputs; o += L) {
        typename V::type total = {};
        for (int64_t i = 0; i < p.positions; i += L) {
            const int64_t at = std::min(i, p.positions - L);
            typename V::type rows[L];
            columns<T>(g + o * p.g_channel, p.g_channel, at, p.outputs - o, rows);
            for (int s = 0; s < L && o + s < p.outputs; s += STEP) {
                T* block = to + (o + s) / BLOCK * apart + at * BLOCK + (o + s) % BLOCK;
                for (int64_t r = 0; r < L; ++r)
                    std::memcpy(block + r * BLOCK, reinterpret_cast<const T*>(rows + r) + s, sizeof(T) * STEP);
            }
            for (int64_t r = 0; r < i - at; ++r) rows[r] = typename V::type{};  // counted before
#pragma GCC unroll 4
            for (int half = L / 2; half >= 1; half /= 2)
#pragma GCC unroll 16
                for (int r = 0; r < half; ++r) rows[r] += rows[r + half];
            total += rows[0];
        }
        for (int64_t r = 0; r < std::min<int64_t>(L, p.outputs - o); ++r) bias[o + r] = total[r];
    }
}

// -- the arithmetic -------------------------------------------------------------------------------------------------

// By example: WIDE channels × NV vectors, all positions of one example, sums in memory.
template <class T, int NV>
void tile(const T* x, const int32_t* starts, int64_t positions, const T* g, T* sum, T* square, bool first) {
    using V = Vec<T>;
    constexpr int L = V::L;
    typename V::type each[WIDE][NV];
#pragma GCC unroll 8
    for (int b = 0; b < WIDE; ++b)
#pragma GCC unroll 3
        for (int v = 0; v < NV; ++v) each[b][v] = typename V::type{};
    for (int64_t l = 0; l < positions; ++l) {
        const T* from = x + starts[l];
        typename V::type a[NV];
#pragma GCC unroll 3
        for (int v = 0; v < NV; ++v) a[v] = V::load(from + v * L);
#pragma GCC unroll 8
        for (int b = 0; b < WIDE; ++b) {
            const T grad = g[l * WIDE + b];
#pragma GCC unroll 3
            for (int v = 0; v < NV; ++v) each[b][v] += a[v] * grad;
        }
    }
#pragma GCC unroll 8
    for (int b = 0; b < WIDE; ++b)
#pragma GCC unroll 3
        for (int v = 0; v < NV; ++v) {
            T *s = sum + (b * NV + v) * L, *q = square + (b * NV + v) * L;
            const typename V::type e = each[b][v];
            V::store(s, first ? e : V::load(s) + e);
            V::store(q, first ? e * e : V::load(q) + e * e);
        }
}

// By tile: NARROW channels × NV vectors of several examples with consecutive inputs. Squares stay in
// registers, too, and so does Σ g in narrow tiles; else more chains of additions hide their latency better.
template <class T, int NV>
void strip(const T* x, const T* g, int64_t examples, int64_t positions, T* sum, T* square, bool first) {
    using V = Vec<T>;
    constexpr int L = V::L;
    constexpr bool KEEP = NV <= THIN;
    const typename V::type zero = {};
    typename V::type s[NARROW][NV], q[NARROW][NV];
#pragma GCC unroll 4
    for (int b = 0; b < NARROW; ++b)
#pragma GCC unroll 3
        for (int v = 0; v < NV; ++v) {
            const int64_t at = (b * NV + v) * L;
            q[b][v] = first ? zero : V::load(square + at);
            if (KEEP) s[b][v] = first ? zero : V::load(sum + at);
            else if (first) V::store(sum + at, zero);
        }
    for (int64_t n = 0; n < examples; ++n) {
        typename V::type each[NARROW][NV];
#pragma GCC unroll 4
        for (int b = 0; b < NARROW; ++b)
#pragma GCC unroll 3
            for (int v = 0; v < NV; ++v) each[b][v] = zero;
        for (int64_t l = 0; l < positions; ++l, x += NV * L, g += NARROW) {
            typename V::type a[NV];
#pragma GCC unroll 3
            for (int v = 0; v < NV; ++v) a[v] = V::load(x + v * L);
#pragma GCC unroll 4
            for (int b = 0; b < NARROW; ++b) {
                const T grad = g[b];
#pragma GCC unroll 3
                for (int v = 0; v < NV; ++v) each[b][v] += a[v] * grad;
            }
        }
#pragma GCC unroll 4
        for (int b = 0; b < NARROW; ++b)
#pragma GCC unroll 3
            for (int v = 0; v < NV; ++v) {
                T* at = sum + (b * NV + v) * L;
                if (KEEP) s[b][v] += each[b][v];
                else V::store(at, V::load(at) + each[b][v]);
                q[b][v] += each[b][v] * each[b][v];
            }
    }
#pragma GCC unroll 4
    for (int b = 0; b < NARROW; ++b)
#pragma GCC unroll 3
        for (int v = 0; v < NV; ++v) {
            V::store(square + (b * NV + v) * L, q[b][v]);
            if (KEEP) V::store(sum + (b * NV + v) * L, s[b][v]);
        }
}

template <class T> struct Job {
    Plan<T> p;
    const T *x, *g;
    T *total, *squares, *bias_total, *bias_squares;
    T scale;
    int threads;
    int32_t *starts = nullptr, *places = nullptr;
    T *bias = nullptr, *xs = nullptr, *gs = nullptr, *sums = nullptr, *strips = nullptr, *rows = nullptr;

    // Lay out the workspace; returns its size in bytes.
    int64_t lay_out(char* work) {
        int64_t used = 0;
        auto take = [&used, work](int64_t entries, int64_t bytes) {
            char* here = work + used;
            used += rounded_up(entries * bytes, ALIGN);
            return here;
        };
        auto some = [&take](int64_t entries) { return reinterpret_cast<T*>(take(entries, sizeof(T))); };
        starts = reinterpret_cast<int32_t*>(take(p.positions, 4));
        places = reinterpret_cast<int32_t*>(take(p.pixels, 4));
        bias = some(p.batch * p.groups * p.outputs);
        const int64_t packs = p.by_example ? threads : p.batch * p.groups;
        xs = some(packs * p.spread);
        const int64_t rest = strips_of_batch() * strip_examples() - p.batch;  // of the last strip
        gs = some((p.by_example ? packs : packs + rest * p.groups) * p.packed_gradient());
        const int64_t kinds = 2 * p.groups * p.sums;
        sums = some(p.by_example ? threads * kinds : p.exact ? 0 : kinds);
        strips = some(p.by_example ? 0 : threads * strip_examples() * p.positions * p.most * Vec<T>::L);
        rows = some(threads * p.block * p.taps * p.channels);
        return used;
    }

    // A thread's sums of g, or of its squares. By tile, they can be stored where the results will be.
    T* sums_of(int kind, int64_t group, int thread = 0) const {
        if (!p.by_example && p.exact) return (kind == 0 ? total : squares) + group * p.sums;
        return sums + ((thread * 2 + kind) * p.groups + group) * p.sums;
    }

    int64_t strip_examples() const {
        const int64_t bytes = p.positions * p.most * BYTES;
        return std::max<int64_t>(1, std::min(p.batch, STRIP_BYTES / bytes));
    }

    int64_t strips_of_batch() const { return divided_up(p.batch, strip_examples()); }

    void tables() {
        int64_t l = 0, i = 0;
        for (int64_t d = 0; d < p.out[0]; ++d)
            for (int64_t h = 0; h < p.out[1]; ++h)
                for (int64_t w = 0; w < p.out[2]; ++w)
                    starts[l++] = place(d * p.stride[0], h * p.stride[1], w * p.stride[2]);
        for (int64_t d = p.padding[0]; d < p.in[0] + p.padding[0]; ++d)
            for (int64_t h = p.padding[1]; h < p.in[1] + p.padding[1]; ++h)
                for (int64_t w = p.padding[2]; w < p.in[2] + p.padding[2]; ++w)
                    places[i++] = d < p.size[0] && h < p.size[1] && w < p.size[2] ? place(d, h, w) : -1;
    }
    int32_t place(int64_t d, int64_t h, int64_t w) const {
        return static_cast<int32_t>(((d * p.size[1] + h) * p.size[2] + w) * p.channels);
    }

    const T* input(int64_t example, int64_t group) const {
        return x + example * p.x_example + group * p.channels * p.x_channel;
    }
    const T* gradient(int64_t example, int64_t group) const {
        return g + example * p.g_example + group * p.outputs * p.g_channel;
    }
    T* bias_of(int64_t example, int64_t group) const { return bias + (example * p.groups + group) * p.outputs; }

    // -- by example

    void examples_of(int thread) {
        T *to_x = xs + thread * p.spread, *to_g = gs + thread * p.packed_gradient();
        const int64_t from = p.batch * thread / threads, to = p.batch * (thread + 1) / threads;
        std::fill(to_x, to_x + p.spread, T(0));  // once: padding stays, the rest is overwritten
        for (int64_t example = from; example < to; ++example)
            for (int64_t group = 0; group < p.groups; ++group) {
                pack_input<T>(p, input(example, group), places, to_x);
                pack_gradient<T, WIDE>(p, gradient(example, group), to_g, p.positions * WIDE, bias_of(example, group));
                for (int64_t b = 0; b < p.blocks; ++b)
                    for (int64_t run = 0; run < p.runs; ++run)
                        for (int64_t t = 0; t < p.tiles; ++t)
                            run_tile(to_x, to_g, b, run, t, sums_of(0, group, thread), sums_of(1, group, thread),
                                     example == from);
            }
    }

    void run_tile(const T* px, const T* pg, int64_t b, int64_t run, int64_t t, T* s, T* q, bool first) {
        const int64_t begin = p.tile_start(t), wide = p.tile_start(t + 1) - begin;
        const T *from = px + p.run_start(run) + begin * Vec<T>::L, *grads = pg + b * p.positions * WIDE;
        s += p.sum_start(b, run, t);
        q += p.sum_start(b, run, t);
        if (wide == 1) tile<T, 1>(from, starts, p.positions, grads, s, q, first);
        else if (wide == 2) tile<T, 2>(from, starts, p.positions, grads, s, q, first);
        else tile<T, 3>(from, starts, p.positions, grads, s, q, first);
    }

    // -- by tile

    void pack_pair(int64_t example, int64_t group) {
        T* to = xs + (example * p.groups + group) * p.spread;
        std::fill(to, to + p.spread, T(0));
        pack_input<T>(p, input(example, group), places, to);
        // [group][strip][block][example of the strip][position][channel of the block]: read from front to back
        const int64_t step = strip_examples(), each = p.positions * NARROW, apart = step * each;
        T* grads = gs + (group * strips_of_batch() + example / step) * p.blocks * apart + example % step * each;
        pack_gradient<T, NARROW>(p, gradient(example, group), grads, apart, bias_of(example, group));
    }

    void tiles_of(int64_t item, T* local) {
        constexpr int L = Vec<T>::L;
        const int64_t t = item % p.tiles, run = item / p.tiles % p.runs, group = item / p.tiles / p.runs;
        const int64_t begin = p.tile_start(t), wide = p.tile_start(t + 1) - begin, step = strip_examples();
        const T* grads = gs + group * strips_of_batch() * p.blocks * step * p.positions * NARROW;
        for (int64_t first = 0; first < p.batch; first += step) {
            const int64_t examples = std::min(step, p.batch - first);
            T* to = local;
            for (int64_t n = first; n < first + examples; ++n) {
                const T* from = xs + (n * p.groups + group) * p.spread + p.run_start(run) + begin * L;
                for (int64_t l = 0; l < p.positions; ++l, to += wide * L)
                    for (int64_t v = 0; v < wide * L; v += L) Vec<T>::store(to + v, Vec<T>::load(from + starts[l] + v));
            }
            for (int64_t b = 0; b < p.blocks; ++b) {
                const T* g0 = grads + (first * p.blocks + b * step) * p.positions * NARROW;
                T* s = sums_of(0, group) + p.sum_start(b, run, t);
                T* q = sums_of(1, group) + p.sum_start(b, run, t);
                if (wide == 1) strip<T, 1>(local, g0, examples, p.positions, s, q, first == 0);
                else if (wide == 2) strip<T, 2>(local, g0, examples, p.positions, s, q, first == 0);
                else strip<T, 3>(local, g0, examples, p.positions, s, q, first == 0);
            }
        }
    }

    // -- from sums to the weight's own [outputs][channels][kernel]

    void finish(int64_t group, int64_t b, T* rows) {
        const int64_t entries = p.channels * p.taps, count = std::min<int64_t>(p.block, p.outputs - b * p.block);
        for (int kind = 0; kind < 2; ++kind) {
            collect(kind, group, b, count, kind == 0 ? T(1) : scale, rows);
            T* weight = (kind == 0 ? total : squares) + (group * p.outputs + b * p.block) * entries;
            for (int64_t o = 0; o < count; ++o)
                for (int64_t c = 0; c < p.channels; ++c)
                    for (int64_t tap = 0; tap < p.taps; ++tap) *weight++ = rows[o * entries + tap * p.channels + c];
        }
    }

    // A block's sums over all threads, as [channel of the block][kernel][input channels].
    void collect(int kind, int64_t group, int64_t b, int64_t outputs, T factor, T* rows) {
        constexpr int L = Vec<T>::L;
        const int64_t entries = p.channels * p.taps, next = 2 * p.groups * p.sums;
        for (int64_t run = 0; run < p.runs; ++run)
            for (int64_t t = 0; t < p.tiles; ++t) {
                const int64_t begin = p.tile_start(t) * L, wide = p.tile_start(t + 1) * L - begin;
                const int64_t count = std::min(wide, p.length - begin);
                for (int64_t o = 0; o < outputs; ++o) {
                    const T* source = sums_of(kind, group) + p.sum_start(b, run, t) + o * wide;
                    T* to = rows + o * entries + run * p.length + begin;
                    for (int64_t e = 0; e < count; ++e) to[e] = source[e] * factor;
                    for (int part = 1; p.by_example && part < threads; ++part)
                        for (int64_t e = 0; e < count; ++e) to[e] += source[part * next + e] * factor;
                }
            }
    }

    void finish_bias() {
        const int64_t channels = p.groups * p.outputs;
        std::fill(bias_total, bias_total + channels, T(0));
        std::fill(bias_squares, bias_squares + channels, T(0));
        for (int64_t example = 0; example < p.batch; ++example)
            for (int64_t o = 0; o < channels; ++o) {
                const T each = bias[example * channels + o];
                bias_total[o] += each;
                bias_squares[o] += each * each;
            }
        for (int64_t o = 0; o < channels; ++o) bias_squares[o] *= scale;
    }

    void run() {
        tables();
        const int64_t pairs = p.batch * p.groups, items = p.tiles * p.runs * p.groups, finals = p.groups * p.blocks;
        if (p.by_example) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
            for (int thread = 0; thread < threads; ++thread) examples_of(thread);
        } else {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
            for (int64_t i = 0; i < pairs; ++i) pack_pair(i / p.groups, i % p.groups);
            const int64_t room = strip_examples() * p.positions * p.most * Vec<T>::L;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
            for (int thread = 0; thread < threads; ++thread)
                for (int64_t i = items * thread / threads; i < items * (thread + 1) / threads; ++i)
                    tiles_of(i, strips + thread * room);
        }
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (int thread = 0; thread < threads; ++thread)
            for (int64_t i = finals * thread / threads; i < finals * (thread + 1) / threads; ++i)
                finish(i / p.blocks, i % p.blocks, rows + thread * p.block * p.taps * p.channels);
        if (bias_total != nullptr) finish_bias();
    }
};

template <class T>
int64_t conv_squares(const Geometry& geometry, const T* x, const T* g, T* total, T* squares, T* bias_total,
                     T* bias_squares, double scale, int64_t threads, char* work) {
    threads = std::max<int64_t>(1, std::min(threads, geometry.batch));
    const Plan<T> plan(geometry, static_cast<int>(threads));
    Job<T> job{plan, x, g, total, squares, bias_total, bias_squares, static_cast<T>(scale), static_cast<int>(threads)};
    const int64_t bytes = job.lay_out(work);
    if (work != nullptr) job.run();
    return bytes;
}

}  // namespace

extern "C" {

// Without a workspace: only return the bytes it must have (aligned to 64).
int64_t credo_conv_squares_float(const Geometry* geometry, const float* x, const float* g, float* total, float* squares,
                                 float* bias_total, float* bias_squares, double scale, int64_t threads, char* work) {
    return conv_squares<float>(*geometry, x, g, total, squares, bias_total, bias_squares, scale, threads, work);
}
int64_t credo_conv_squares_double(const Geometry* geometry, const double* x, const double* g, double* total,
                                  double* squares, double* bias_total, double* bias_squares, double scale,
                                  int64_t threads, char* work) {
    return conv_squares<double>(*geometry, x, g, total, squares, bias_total, bias_squares, scale, threads, work);
}

}  // extern "C"
