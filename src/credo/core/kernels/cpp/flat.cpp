// Passes over flat vectors of weights: Gaussian draws with noise generated on the fly, and their backward passes.
//
// Noise comes from Philox4x32-7 (Salmon et al. 2011: the fewest rounds that pass BigCrush) through Box-Muller: entry i of the noise with key k is a pure
// function of (k, i), so the backward pass regenerates it instead of storing it.
// Vectors are processed in blocks of B entries that stay in cache; loops are written for the vectoriser.
// Means and gradients are passed as lists of tensors that form one vector, everything else as one vector.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t B = 1024;  // entries a block
constexpr int ROUNDS = 7;
constexpr int Q = B / 4;     // Philox counters a block: each gives four numbers

inline float bits_to_float(uint32_t x) { float f; std::memcpy(&f, &x, 4); return f; }
inline uint32_t float_to_bits(float f) { uint32_t x; std::memcpy(&x, &f, 4); return x; }

// Natural logarithm of a positive normal number: mantissa to [√½, √2), then a polynomial (Cephes' coefficients).
inline float fast_log(float x) {
    uint32_t u = float_to_bits(x);
    const int32_t shifted = static_cast<int32_t>(u) - 0x3f3504f3;
    const float e = static_cast<float>(shifted >> 23);
    u = static_cast<uint32_t>((shifted & 0x007fffff) + 0x3f3504f3);
    const float m = bits_to_float(u) - 1.0f;
    float p = 7.0376836292e-2f;
    p = p * m - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    const float z = m * m;
    float y = m * z * p;
    y += e * -2.12194440e-4f;
    y -= 0.5f * z;
    return m + y + e * 0.693359375f;
}

// exp for arguments in [-87, 88]; smaller ones give exp(-87), about 1e-38.
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
    return p * bits_to_float(static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23);
}

// softplus and its derivative. log1p(e) = 2·artanh(e / (2 + e)) as a series keeps its relative precision for tiny e.
inline void softplus(float rho, float& value, float& derivative) {
    const float e = fast_exp(-std::fabs(rho));
    const float u = 1.0f + e, v = 2.0f + e, both = 1.0f / (u * v);
    const float s = e * u * both, z = s * s;  // s = e / (2 + e), at most 1/3
    float p = 0.11615537f;
    p = p * z + 0.10848088f;
    p = p * z + 0.1429697f;
    p = p * z + 0.19999818f;
    p = p * z + 0.33333334f;
    value = std::max(rho, 0.0f) + 2.0f * (s + s * z * p);
    derivative = (rho >= 0.0f ? 1.0f : e) * v * both;
}

// cos and sin of 2·pi·x for x in [0, 1): reduce to an eighth of the circle.
inline void turn(float x, float& c, float& s) {
    const float k = std::nearbyint(x * 4.0f);
    const float r = (x - 0.25f * k) * 6.28318530717958647692f;  // in [-pi/4, pi/4]
    const float z = r * r;
    const float sr = r + r * z * (-1.6666654611e-1f + z * (8.3321608736e-3f + z * -1.9515295891e-4f));
    const float cr = 1.0f - 0.5f * z
        + z * z * (4.166664568298827e-2f + z * (-1.388731625493765e-3f + z * 2.443315711809948e-5f));
    const int32_t q = static_cast<int32_t>(k);
    const float a = (q & 1) ? sr : cr, b = (q & 1) ? cr : sr;
    c = ((q + 1) & 2) ? -a : a;
    s = (q & 2) ? -b : b;
}

// Two standard normals from two words. The radius' argument lies in (0, 1], so its logarithm is finite; its smallest
// value, 2^-33, is 6.8 standard deviations out.
inline void box_muller(uint32_t a, uint32_t b, float& first, float& second) {
    const float u = (static_cast<float>(a) + 0.5f) * 2.3283064365386963e-10f;
    const float radius = std::sqrt(std::max(-2.0f * fast_log(u), 0.0f));
    float c, s;
    turn(static_cast<float>(b >> 8) * 5.9604644775390625e-8f, c, s);
    first = radius * c;
    second = radius * s;
}

constexpr uint32_t M0 = 0xD2511F53u, M1 = 0xCD9E8D57u, W0 = 0x9E3779B9u, W1 = 0xBB67AE85u;

// The words of counters first … first + Q - 1: word w of counter j at words[w * Q + j]. Q divides 2^32, so that all
// counters of a block share their upper half.
#if defined(__AVX512F__)
void philox(uint64_t key, uint64_t first, uint32_t* words) {
    const __m512i step = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i m0 = _mm512_set1_epi64(M0), m1 = _mm512_set1_epi64(M1);
    for (int j = 0; j < Q; j += 8) {
        // One counter in each 64-bit lane: multiplication reads lower halves only, so what is above does not matter.
        __m512i c0 = _mm512_add_epi64(_mm512_set1_epi64(static_cast<int64_t>(first) + j), step);
        __m512i c1 = _mm512_srli_epi64(c0, 32), c2 = _mm512_setzero_si512(), c3 = c2;
        uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#pragma GCC unroll 10
        for (int round = 0; round < ROUNDS; ++round) {
            const __m512i p0 = _mm512_mul_epu32(c0, m0), p1 = _mm512_mul_epu32(c2, m1);
            c0 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p1, 32), c1, _mm512_set1_epi64(k0), 0x96);
            c2 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p0, 32), c3, _mm512_set1_epi64(k1), 0x96);
            c1 = p1;
            c3 = p0;
            k0 += W0;
            k1 += W1;
        }
        const __m512i out[4] = {c0, c1, c2, c3};
        for (int w = 0; w < 4; ++w)
            _mm256_store_si256(reinterpret_cast<__m256i*>(words + w * Q + j), _mm512_cvtepi64_epi32(out[w]));
    }
}
#else
void philox(uint64_t key, uint64_t first, uint32_t* words) {
    for (uint32_t j = 0; j < Q; ++j) {
        uint32_t c0 = static_cast<uint32_t>(first) + j, c1 = static_cast<uint32_t>(first >> 32), c2 = 0, c3 = 0;
        uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#pragma GCC unroll 10
        for (int round = 0; round < ROUNDS; ++round) {
            const uint64_t p0 = static_cast<uint64_t>(M0) * c0, p1 = static_cast<uint64_t>(M1) * c2;
            c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
            c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
            c1 = static_cast<uint32_t>(p1);
            c3 = static_cast<uint32_t>(p0);
            k0 += W0;
            k1 += W1;
        }
        words[j] = c0;
        words[Q + j] = c1;
        words[2 * Q + j] = c2;
        words[3 * Q + j] = c3;
    }
}
#endif

// B standard normals: entries [block * B, (block + 1) * B) of the noise with this key.
void normals(uint64_t key, uint64_t block, float* out) {
    alignas(64) uint32_t words[B];
    philox(key, block * Q, words);
    for (int half = 0; half < B; half += 2 * Q)
        for (int j = half; j < half + Q; ++j) box_muller(words[j], words[Q + j], out[j], out[Q + j]);
}

// Copy entries [begin, end) of a list of tensors (null: zeros); `at` is the cursor.
struct Tensors {
    float* const* data;
    const int64_t* sizes;
    int64_t count;

    template <class Use> void numbered(int64_t begin, int64_t end, Use use) const {
        each(begin, end, [&](const float*, int64_t at, int64_t n, int64_t t) { use(t, at, n); });
    }
    template <class Use> void each(int64_t begin, int64_t end, Use use) const {
        int64_t start = 0;
        for (int64_t t = 0; t < count && start < end; ++t) {
            const int64_t stop = start + sizes[t];
            if (stop > begin) {
                const int64_t a = std::max(begin, start), b = std::min(end, stop);
                use(data[t] == nullptr ? nullptr : data[t] + (a - start), a - begin, b - a, t);
            }
            start = stop;
        }
    }
    void read(int64_t begin, int64_t end, float* out) const {
        each(begin, end, [out](const float* p, int64_t at, int64_t n, int64_t) {
            if (p == nullptr) std::fill(out + at, out + at + n, 0.0f);
            else std::memcpy(out + at, p, sizeof(float) * n);
        });
    }
    void write(int64_t begin, int64_t end, const float* in) const {
        each(begin, end, [in](float* p, int64_t at, int64_t n, int64_t) {
            if (p != nullptr) std::memcpy(p, in + at, sizeof(float) * n);
        });
    }
};

double sum(const float* x, int64_t n) {
    double lanes[16] = {0};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int l = 0; l < 16; ++l) lanes[l] += x[i + l];
    for (; i < n; ++i) lanes[i & 15] += x[i];
    double total = 0;
    for (double lane : lanes) total += lane;
    return total;
}

// Σ log x of at most B positive normal numbers by one logarithm: a product of 64 mantissas in [√½, √2) is in the range of
// a float, and one of 1024 in that of a double.
double sum_of_logs(const float* x, int64_t n) {
    float product[16];
    int32_t exponent[16] = {0};
    for (float& lane : product) lane = 1.0f;
    const auto take = [&](int64_t i, int l) {
        const int32_t shifted = static_cast<int32_t>(float_to_bits(x[i])) - 0x3f3504f3;
        exponent[l] += shifted >> 23;
        product[l] *= bits_to_float(static_cast<uint32_t>((shifted & 0x007fffff) + 0x3f3504f3));
    };
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int l = 0; l < 16; ++l) take(i + l, l);
    for (; i < n; ++i) take(i, i & 15);
    double whole = 1;
    int64_t power = 0;
    for (float lane : product) whole *= lane;
    for (int32_t lane : exponent) power += lane;
    return static_cast<double>(power) * 0.6931471805599453 + std::log(whole);
}

}  // namespace

extern "C" {

// The raw words of one block, for the tests: known answers of the generator.
void credo_philox(uint64_t key, uint64_t block, uint32_t* words) { philox(key, block * Q, words); }

void credo_normal(uint64_t key, int64_t size, float* out, int threads) {
    const int64_t blocks = (size + B - 1) / B;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t b = 0; b < blocks; ++b) {
        alignas(64) float eps[B];
        normals(key, static_cast<uint64_t>(b), eps);
        std::memcpy(out + b * B, eps, sizeof(float) * std::min(B, size - b * B));
    }
}

// out = mean + deviation·eps(key)
void credo_gaussian(const float* mean, const float* deviation, uint64_t key, int64_t size, float* out,
                    int threads) {
    const int64_t blocks = (size + B - 1) / B;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t b = 0; b < blocks; ++b) {
        alignas(64) float eps[B];
        const int64_t begin = b * B, n = std::min(B, size - begin);
        normals(key, static_cast<uint64_t>(b), eps);
        for (int64_t i = 0; i < n; ++i) out[begin + i] = mean[begin + i] + deviation[begin + i] * eps[i];
    }
}

// out = x·keep/(1 - rate), keep being one with probability 1 - rate: where a word of the noise is at least `least`.
void credo_dropout(const float* x, uint64_t key, int64_t size, uint32_t least, float scale, float* out, int threads) {
    const int64_t blocks = (size + B - 1) / B;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t b = 0; b < blocks; ++b) {
        alignas(64) uint32_t words[B];
        const int64_t begin = b * B, n = std::min(B, size - begin);
        philox(key, static_cast<uint64_t>(b) * Q, words);
        for (int64_t i = 0; i < n; ++i) out[begin + i] = words[i] >= least ? x[begin + i] * scale : 0.0f;
    }
}

// Rows of `length` entries, each times its scale.
void credo_scale_rows(const float* x, const float* scale, int64_t rows, int64_t length, float* out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t r = 0; r < rows; ++r) {
        const float z = scale[r];
        for (int64_t i = r * length; i < (r + 1) * length; ++i) out[i] = x[i] * z;
    }
}

// Backward pass: by_x = g·scale (unless null) and by_scale = the sum of g·x over a row.
void credo_scale_rows_back(const float* x, const float* scale, const float* g, int64_t rows, int64_t length,
                           float* by_x, float* by_scale, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t r = 0; r < rows; ++r) {
        const float z = scale[r];
        const int64_t begin = r * length;
        float lanes[16] = {0};
        int64_t i = 0;
        for (; i + 16 <= length; i += 16)
            for (int l = 0; l < 16; ++l) lanes[l] += g[begin + i + l] * x[begin + i + l];
        for (; i < length; ++i) lanes[i & 15] += g[begin + i] * x[begin + i];
        float total = 0;
        for (float lane : lanes) total += lane;
        by_scale[r] = total;
        if (by_x != nullptr)
            for (i = 0; i < length; ++i) by_x[begin + i] = g[begin + i] * z;
    }
}

void credo_softplus(const float* rho, int64_t size, float* std, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t i = 0; i < size; ++i) {
        float derivative;
        softplus(rho[i], std[i], derivative);
    }
}

// out = mean + softplus(rho)·eps(key)
void credo_softplus_draw(float* const* means, const int64_t* sizes, int64_t count, const float* rho, uint64_t key,
                         int64_t size, float* out, int threads) {
    const Tensors mean{means, sizes, count};
    const int64_t blocks = (size + B - 1) / B;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t b = 0; b < blocks; ++b) {
        alignas(64) float eps[B], mu[B];
        const int64_t begin = b * B, n = std::min(B, size - begin);
        normals(key, static_cast<uint64_t>(b), eps);
        mean.read(begin, begin + n, mu);
        for (int64_t i = 0; i < n; ++i) {
            float std, derivative;
            softplus(rho[begin + i], std, derivative);
            out[begin + i] = mu[i] + std * eps[i];
        }
    }
}

// Backward pass from the gradient g with respect to w = mean + softplus(rho)·eps(key):
//   of the mean: g;   of rho: g·eps·sigmoid(rho),
// plus `kl_weight` times the gradients of KL(N(mean, std²) ‖ N(prior_mean, 1/prior_precision)).
// g is overwritten by (or, with `add`, both are added to) the totals: `by_mean` and `by_rho` receive them. `by_mean`
// may be g itself. Returns in `sums`: the KL without its constant (Σ −log std + ½·precision·(std² + offset²)), and the
// sum of squares of both totals.
void credo_softplus_back(float* const* means, const int64_t* sizes, int64_t count, const float* rho, uint64_t key,
                         int64_t size, float* const* gradients, float* const* by_means, float* by_rho, int add,
                         float kl_weight, float prior_mean, float prior_precision, double* sums, int threads) {
    const Tensors mean{means, sizes, count}, gradient{gradients, sizes, count}, by_mean{by_means, sizes, count};
    const int64_t blocks = (size + B - 1) / B;
    double kl = 0, squares = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : kl, squares) if (threads > 1)
    for (int64_t b = 0; b < blocks; ++b) {
        alignas(64) float eps[B], mu[B], g[B], old[B], stds[B], terms[B], total[B];
        const int64_t begin = b * B, n = std::min(B, size - begin);
        normals(key, static_cast<uint64_t>(b), eps);
        mean.read(begin, begin + n, mu);
        gradient.read(begin, begin + n, g);
        if (add) by_mean.read(begin, begin + n, old);
        else std::fill(old, old + n, 0.0f);
        for (int64_t i = 0; i < n; ++i) {
            float std, derivative;
            softplus(rho[begin + i], std, derivative);
            const float offset = mu[i] - prior_mean;
            stds[i] = std;
            terms[i] = 0.5f * prior_precision * (std * std + offset * offset);
            const float m = g[i] + kl_weight * prior_precision * offset + old[i];
            const float before = add ? by_rho[begin + i] : 0.0f;
            const float r = before + derivative * (g[i] * eps[i] + kl_weight * (prior_precision * std - 1.0f / std));
            by_rho[begin + i] = r;
            mu[i] = m;
            total[i] = m * m + r * r;
        }
        by_mean.write(begin, begin + n, mu);
        kl += sum(terms, n) - sum_of_logs(stds, n);
        squares += sum(total, n);
    }
    sums[0] = kl;
    sums[1] = squares;
}

// out = mean + eps(key)·sqrt(scale / (curvature + shift))
void credo_precision_draw(float* const* means, const int64_t* sizes, int64_t count, const float* curvature,
                          uint64_t key, int64_t size, float scale, float shift, float* out, int threads) {
    const Tensors mean{means, sizes, count};
    const int64_t blocks = (size + B - 1) / B;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t b = 0; b < blocks; ++b) {
        alignas(64) float eps[B], mu[B];
        const int64_t begin = b * B, n = std::min(B, size - begin);
        normals(key, static_cast<uint64_t>(b), eps);
        mean.read(begin, begin + n, mu);
        for (int64_t i = 0; i < n; ++i)
            out[begin + i] = mu[i] + eps[i] * std::sqrt(scale / (curvature[begin + i] + shift));
    }
}

// Price's estimate of the Hessian's diagonal from the gradient g at the draw above: g·eps / std, times `factor`, written
// or added to `hessian`.
void credo_price(float* const* gradients, const int64_t* sizes, int64_t count, const float* curvature, uint64_t key,
                 int64_t size, float scale, float shift, float factor, int add, float* hessian, int threads) {
    const Tensors gradient{gradients, sizes, count};
    const int64_t blocks = (size + B - 1) / B;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t b = 0; b < blocks; ++b) {
        alignas(64) float eps[B], g[B];
        const int64_t begin = b * B, n = std::min(B, size - begin);
        normals(key, static_cast<uint64_t>(b), eps);
        gradient.read(begin, begin + n, g);
        for (int64_t i = 0; i < n; ++i) {
            const float h = factor * g[i] * eps[i] * std::sqrt((curvature[begin + i] + shift) / scale);
            hessian[begin + i] = (add ? hessian[begin + i] : 0.0f) + h;
        }
    }
}

// Hyper-parameters of an update; the same struct as in flat.py.
struct Update {
    float lr;            // step size
    float keep;          // weight of the old momentum
    float take;          // weight of the new gradient in it
    float debias;        // momentum is multiplied by this for the step
    float decay;         // weight of the old curvature
    float renew;         // weight of the new one
    float shift;         // the prior's part of the denominator
    float damping;       // the rest of it
    float prior_mean;
    float clip;          // largest entry of the direction, or infinity
    float gradient_scale, curvature_scale;  // factors that turn the accumulated sums into means
    float correction;    // curvature's second-order correction: ½·renew² (h − ĥ)² / (h + shift), times this
    int coupled;         // whether the prior's pull goes through the momentum
    float variance;      // for the KL: variance = this / (curvature + shift + damping); 0: no KL
    float prior_precision;
    float square_decay, square_debias;  // weight of the old squared gradients, and the factor that makes them unbiased
};

static inline float next_curvature(const Update& u, float now, float found, float half) {
    const float gap = u.renew * (now - found);
    const float second = half * gap * (gap / std::max(now + u.shift, 1e-30f));  // no gap²: it may overflow
    return u.decay * now + u.renew * found + (half > 0.0f ? second : 0.0f);
}

// momentum ← keep·momentum + take·(g + coupled·pull), curvature ← decay·curvature + renew·h (+ correction),
// mean ← mean − lr·clip((debias·momentum + (1 − coupled)·pull) / (curvature + shift + damping)),
// where pull = shift·(mean − prior_mean). With `slopes`, which follow (g + pull)², the direction is Adam's instead:
// debias·momentum / (√(square_debias·slopes) + 1e-8). Nothing is written if `dry`. Returns in `sums`: KL(q ‖ p) of the
// state before, and the sum of squares of g and h (not finite if any of them or of the corrected curvatures is not).
void credo_update(float* const* means, float* const* gradients, float* const* curvatures, const int64_t* sizes,
                  int64_t count, float* momentum, float* curvature, float* slopes, int64_t size,
                  const Update* update, int dry, double* sums, int threads) {
    const Tensors mean{means, sizes, count}, gradient{gradients, sizes, count}, fresh{curvatures, sizes, count};
    const Update u = *update;
    const int64_t blocks = (size + B - 1) / B;
    double kl = 0, squares = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : kl, squares) if (threads > 1)
    for (int64_t b = 0; b < blocks; ++b) {
        alignas(64) float mu[B], g[B], h[B], ratios[B], terms[B];
        const int64_t begin = b * B, n = std::min(B, size - begin);
        mean.read(begin, begin + n, mu);
        gradient.read(begin, begin + n, g);
        fresh.read(begin, begin + n, h);
        float* __restrict m = momentum + begin;
        float* __restrict s = curvature + begin;
        const float half = 0.5f * u.correction;
        if (dry) {
            for (int64_t i = 0; i < n; ++i) terms[i] = g[i] * g[i] + h[i] * h[i];
            double part = sum(terms, n);
            if (!std::isfinite(part)) {  // perhaps only a square was too large
                part = 0;
                for (int64_t i = 0; i < n; ++i) part += double(g[i]) * g[i] + double(h[i]) * h[i];
            }
            squares += part;
            if (half > 0.0f) {
                for (int64_t i = 0; i < n; ++i)  // 0·∞ is NaN: the sum shows that it would not stay finite
                    terms[i] = 0.0f * next_curvature(u, s[i], h[i] * u.curvature_scale, half);
                squares += sum(terms, n);
            }
            if (u.variance > 0.0f) {
                for (int64_t i = 0; i < n; ++i) {
                    const float ratio = u.prior_precision * u.variance / (s[i] + u.shift + u.damping);
                    const float offset = mu[i] - u.prior_mean;
                    ratios[i] = ratio;
                    terms[i] = 0.5f * (ratio - 1.0f + u.prior_precision * offset * offset);
                }
                kl += sum(terms, n) - 0.5 * sum_of_logs(ratios, n);
            }
            continue;
        }
        const float through = u.coupled ? 1.0f : 0.0f, beside = 1.0f - through;
        if (slopes) {
            float* __restrict v = slopes + begin;
            for (int64_t i = 0; i < n; ++i) {
                const float pull = u.shift * (mu[i] - u.prior_mean);
                const float slope = g[i] * u.gradient_scale + through * pull;
                v[i] = u.square_decay * v[i] + (1.0f - u.square_decay) * slope * slope;
                s[i] = next_curvature(u, s[i], h[i] * u.curvature_scale, half);
                m[i] = u.keep * m[i] + u.take * slope;
                const float direction = (u.debias * m[i] + beside * pull) / (std::sqrt(u.square_debias * v[i]) + 1e-8f);
                mu[i] -= u.lr * std::min(std::max(direction, -u.clip), u.clip);
            }
            mean.write(begin, begin + n, mu);
            continue;
        }
        for (int64_t i = 0; i < n; ++i) {
            const float pull = u.shift * (mu[i] - u.prior_mean);
            const float next = next_curvature(u, s[i], h[i] * u.curvature_scale, half);
            const float speed = u.keep * m[i] + u.take * (g[i] * u.gradient_scale + through * pull);
            const float below = std::max(next + u.shift + u.damping, 1e-30f);  // an unused entry is 0 / 0 else
            const float direction = (u.debias * speed + beside * pull) / below;
            s[i] = next;
            m[i] = speed;
            mu[i] -= u.lr * std::min(std::max(direction, -u.clip), u.clip);
        }
        mean.write(begin, begin + n, mu);
    }
    sums[0] = kl;
    sums[1] = squares;
}

// One Langevin step: velocity ← keep·velocity − r·(g + pull·(w − prior_mean)) + noise·eps(key), w ← w + r·velocity,
// where r = roots[t], the root of the learning rate of tensor t. The prior and the noise act on the first `random`
// entries. Without `velocity` nothing is kept of it. Returns the sum of (w − prior_mean)² over these before the step.
double credo_langevin(float* const* weights, float* const* gradients, const int64_t* sizes, int64_t count,
                      const float* roots, float* velocity, int64_t size, int64_t random, float keep, float noise,
                      float pull, float prior_mean, uint64_t key, int threads) {
    const Tensors weight{weights, sizes, count}, gradient{gradients, sizes, count};
    const int64_t blocks = (size + B - 1) / B;
    double offsets = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : offsets) if (threads > 1)
    for (int64_t b = 0; b < blocks; ++b) {
        alignas(64) float w[B], g[B], eps[B], root[B], old[B], terms[B];
        const int64_t begin = b * B, n = std::min(B, size - begin);
        const int64_t own = std::min(std::max(random - begin, int64_t(0)), n);  // random entries of the block
        weight.read(begin, begin + n, w);
        gradient.read(begin, begin + n, g);
        weight.numbered(begin, begin + n, [&](int64_t t, int64_t at, int64_t m) {
            std::fill(root + at, root + at + m, roots[t]);
        });
        if (noise > 0.0f && own > 0) normals(key, static_cast<uint64_t>(b), eps);
        std::fill(eps + (noise > 0.0f ? own : 0), eps + B, 0.0f);
        for (int64_t i = 0; i < own; ++i) {
            const float offset = w[i] - prior_mean;
            g[i] += pull * offset;
            terms[i] = offset * offset;
        }
        offsets += sum(terms, own);
        if (velocity == nullptr) std::fill(old, old + n, 0.0f);
        float* __restrict v = velocity == nullptr ? old : velocity + begin;
        for (int64_t i = 0; i < n; ++i) {
            v[i] = keep * v[i] - root[i] * g[i] + noise * eps[i];
            w[i] += root[i] * v[i];
        }
        weight.write(begin, begin + n, w);
    }
    return offsets;
}

}  // extern "C"
