// A layer of LSTM cells over all times, in single precision: its forward pass, which keeps what the backward pass needs,
// and the gradients by its gates.
//
// Tensors are [batch][time][features], gates in torch's order i, f, g, o. Examples are independent: a thread takes some
// of them through all times, ROWS at once, so that the weights are read from cache once for several examples.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int ROWS = 8, LANES = 32;

// exp for arguments in [-87, 88], the others as these (Cephes' coefficients).
inline float fast_exp(float x) {
    x = std::min(std::max(x, -87.0f), 88.0f);
    const float n = std::nearbyint(x * 1.44269504088896341f);
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return p * power;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + fast_exp(-x)); }

// Near zero a polynomial, where 1 - exp would lose digits.
inline float tanh_of(float x) {
    const float s = x * x;
    float p = -5.70498872745e-3f;
    p = p * s + 2.06390887954e-2f;
    p = p * s - 5.37397155531e-2f;
    p = p * s + 1.33314422036e-1f;
    p = p * s - 3.33332819422e-1f;
    const float near = x + x * s * p, far = 1.0f - 2.0f / (1.0f + fast_exp(2.0f * std::fabs(x)));
    return std::fabs(x) < 0.625f ? near : std::copysign(far, x);
}

// A matrix [inner][outer] with its columns filled up by zeros to whole LANES.
struct Matrix {
    int64_t inner, outer;
    std::vector<float> values;

    Matrix(const float* w, int64_t inner, int64_t outer, int64_t step, int64_t across)
        : inner(inner), outer((outer + LANES - 1) / LANES * LANES), values(static_cast<size_t>(inner * this->outer)) {
        for (int64_t k = 0; k < inner; ++k)
            for (int64_t c = 0; c < outer; ++c) values[static_cast<size_t>(k * this->outer + c)] = w[k * step + c * across];
    }

    // out = a · matrix for ROWS rows of `inner` and of `outer` entries.
    void product(const float* a, float* out) const {
        for (int64_t c = 0; c < outer; c += LANES) {
            float sums[ROWS][LANES] = {};
            const float* w = values.data() + c;
            for (int64_t k = 0; k < inner; ++k, w += outer)
                for (int r = 0; r < ROWS; ++r) {
                    const float each = a[r * inner + k];
                    for (int l = 0; l < LANES; ++l) sums[r][l] += each * w[l];
                }
            for (int r = 0; r < ROWS; ++r) std::memcpy(out + r * outer + c, sums[r], sizeof sums[r]);
        }
    }
};

// Calls work(first, rows) for groups of at most ROWS examples.
template <class Work> void for_rows(int64_t batch, int threads, const Work& work) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < batch; first += ROWS)
        work(first, static_cast<int>(std::min<int64_t>(ROWS, batch - first)));
}

}  // namespace

extern "C" {

// gates: W_ih x + b_ih + b_hh on entry, the gates on exit; w is W_hh [4 size][size].
void credo_lstm(
    int64_t batch, int64_t times, int64_t size, const float* w, const float* h0, const float* c0, float* gates,
    float* memories, float* states, int threads) {
    const Matrix by_state(w, size, 4 * size, 1, size);
    for_rows(batch, threads, [&](int64_t first, int rows) {
        std::vector<float> state(static_cast<size_t>(ROWS * size)), inner(static_cast<size_t>(ROWS * by_state.outer));
        std::memcpy(state.data(), h0 + first * size, sizeof(float) * static_cast<size_t>(rows * size));
        for (int64_t t = 0; t < times; ++t) {
            by_state.product(state.data(), inner.data());
            for (int r = 0; r < rows; ++r) {
                const int64_t at = (first + r) * times + t;
                const float* add = inner.data() + r * by_state.outer;
                const float* before = t ? memories + (at - 1) * size : c0 + (first + r) * size;
                float *i = gates + at * 4 * size, *f = i + size, *g = f + size, *o = g + size;
                float *memory = memories + at * size, *out = states + at * size, *next = state.data() + r * size;
#pragma omp simd
                for (int64_t j = 0; j < size; ++j) {
                    i[j] = sigmoid(i[j] + add[j]);
                    f[j] = sigmoid(f[j] + add[size + j]);
                    g[j] = tanh_of(g[j] + add[2 * size + j]);
                    o[j] = sigmoid(o[j] + add[3 * size + j]);
                    memory[j] = f[j] * before[j] + i[j] * g[j];
                    next[j] = out[j] = o[j] * tanh_of(memory[j]);
                }
            }
        }
    });
}

// found: gradients by what goes into the gates; dh are those by the states, and state and memory, those by the last
// state (beyond dh) and memory on entry, are those by the first ones on exit.
void credo_lstm_back(
    int64_t batch, int64_t times, int64_t size, const float* w, const float* c0, const float* gates,
    const float* memories, const float* dh, float* found, float* state, float* memory, int threads) {
    const Matrix to_state(w, 4 * size, size, size, 1);
    for_rows(batch, threads, [&](int64_t first, int rows) {
        std::vector<float> own(static_cast<size_t>(ROWS * 4 * size)), earlier(static_cast<size_t>(ROWS * to_state.outer));
        for (int64_t t = times - 1; t >= 0; --t) {
            for (int r = 0; r < rows; ++r) {
                const int64_t at = (first + r) * times + t;
                const float *i = gates + at * 4 * size, *f = i + size, *g = f + size, *o = g + size;
                const float *now = memories + at * size, *given = dh + at * size;
                const float* before = t ? now - size : c0 + (first + r) * size;
                float *dm = memory + (first + r) * size, *ds = state + (first + r) * size;
                float* to = own.data() + r * 4 * size;
#pragma omp simd
                for (int64_t j = 0; j < size; ++j) {
                    const float out = tanh_of(now[j]), s = ds[j] + given[j], m = dm[j] + s * o[j] * (1.0f - out * out);
                    to[j] = m * g[j] * i[j] * (1.0f - i[j]);
                    to[size + j] = m * before[j] * f[j] * (1.0f - f[j]);
                    to[2 * size + j] = m * i[j] * (1.0f - g[j] * g[j]);
                    to[3 * size + j] = s * out * o[j] * (1.0f - o[j]);
                    dm[j] = m * f[j];
                }
                std::memcpy(found + at * 4 * size, to, sizeof(float) * static_cast<size_t>(4 * size));
            }
            to_state.product(own.data(), earlier.data());
            for (int r = 0; r < rows; ++r)
                std::memcpy(state + (first + r) * size, earlier.data() + r * to_state.outer,
                            sizeof(float) * static_cast<size_t>(size));
        }
    });
}
}
