// Backward pass of batch normalisation, with sums of squared per-example gradients of its affine parameters.
//
// Tensors are [batch][channels][positions]. One pass over input x and output gradient g computes sufficient statistics
// for every example and channel; a second one the gradient with respect to the input.

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace {

constexpr int LANES = 64;  // independent sums: enough to hide latency, and few additions in a row lose less

// Sums of a row of x and g, x being shifted by its first entry so that a large mean costs no digits.
struct Row {
    double shift, d, dd, g, gd;
};

template <class T> Row sums_of(const T* x, const T* g, int64_t count) {
    const T shift = x[0];
    T d[LANES] = {0}, dd[LANES] = {0}, s[LANES] = {0}, gd[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int l = 0; l < LANES; ++l) {
            const T a = x[i + l] - shift, b = g[i + l];
            d[l] += a;
            dd[l] += a * a;
            s[l] += b;
            gd[l] += a * b;
        }
    for (int l = 0; i + l < count; ++l) {
        const T a = x[i + l] - shift, b = g[i + l];
        d[l] += a;
        dd[l] += a * a;
        s[l] += b;
        gd[l] += a * b;
    }
    Row row{static_cast<double>(shift), 0, 0, 0, 0};
    for (int l = 0; l < LANES; ++l) {
        row.d += d[l];
        row.dd += dd[l];
        row.g += s[l];
        row.gd += gd[l];
    }
    return row;
}

template <class T> struct Job {
    int64_t batch, channels, positions;
    const T *x, *g, *weight;
    const T *mean, *var;  // of all data, or null: those of the batch
    double eps, scale;
    T *dx, *total, *squares, *bias_total, *bias_squares;  // dx may be null
    double* work;  // Rows, then three numbers for each channel
    int threads;

    Row* rows() const { return reinterpret_cast<Row*>(work); }
    // dx = factor · (g − offset − (x − centre) · coefficient)
    double* back(int64_t c) const { return work + 5 * batch * channels + 4 * c; }

    void channel(int64_t c) {
        const double count = static_cast<double>(batch * positions), per = static_cast<double>(positions);
        double centre = 0, spread = 0;
        if (mean != nullptr) {
            centre = mean[c];
            spread = var[c];
        } else {
            for (int64_t n = 0; n < batch; ++n) {
                const Row& r = rows()[n * channels + c];
                centre += (r.d + per * r.shift) / count;
            }
            for (int64_t n = 0; n < batch; ++n) {
                const Row& r = rows()[n * channels + c];
                const double off = centre - r.shift;
                spread += (r.dd - 2 * off * r.d + per * off * off) / count;
            }
        }
        const double inverse = 1 / std::sqrt(std::max(spread, 0.0) + eps);
        double w = 0, ww = 0, b = 0, bb = 0;
        for (int64_t n = 0; n < batch; ++n) {
            const Row& r = rows()[n * channels + c];
            const double each = (r.gd + (r.shift - centre) * r.g) * inverse;
            w += each;
            ww += each * each;
            b += r.g;
            bb += r.g * r.g;
        }
        total[c] = static_cast<T>(w);
        squares[c] = static_cast<T>(ww * scale);
        bias_total[c] = static_cast<T>(b);
        bias_squares[c] = static_cast<T>(bb * scale);
        double* to = back(c);
        to[0] = inverse * (weight == nullptr ? 1.0 : static_cast<double>(weight[c]));
        to[1] = mean == nullptr ? b / count : 0;
        to[2] = centre;
        to[3] = mean == nullptr ? w * inverse / count : 0;
    }

    void input_row(int64_t row) {
        const double* k = back(row % channels);
        const T factor = static_cast<T>(k[0]), offset = static_cast<T>(k[1]), centre = static_cast<T>(k[2]);
        const T coefficient = static_cast<T>(k[3]);
        const T *xs = x + row * positions, *gs = g + row * positions;
        T* to = dx + row * positions;
        for (int64_t i = 0; i < positions; ++i) to[i] = factor * (gs[i] - offset - (xs[i] - centre) * coefficient);
    }

    void run() {
        const int64_t count = batch * channels;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (int64_t row = 0; row < count; ++row)
            rows()[row] = sums_of<T>(x + row * positions, g + row * positions, positions);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (int64_t c = 0; c < channels; ++c) channel(c);
        if (dx == nullptr) return;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (int64_t row = 0; row < count; ++row) input_row(row);
    }
};

}  // namespace

extern "C" {

// `work` has room for 5·batch·channels + 4·channels numbers.
void credo_norm_squares_float(int64_t batch, int64_t channels, int64_t positions, const float* x, const float* g,
                              const float* weight, const float* mean, const float* var, double eps, double scale,
                              float* dx, float* total, float* squares, float* bias_total, float* bias_squares,
                              double* work, int threads) {
    Job<float>{batch, channels, positions, x, g, weight, mean, var, eps, scale, dx, total, squares, bias_total,
               bias_squares, work, threads}.run();
}
void credo_norm_squares_double(int64_t batch, int64_t channels, int64_t positions, const double* x, const double* g,
                               const double* weight, const double* mean, const double* var, double eps, double scale,
                               double* dx, double* total, double* squares, double* bias_total, double* bias_squares,
                               double* work, int threads) {
    Job<double>{batch, channels, positions, x, g, weight, mean, var, eps, scale, dx, total, squares, bias_total,
                bias_squares, work, threads}.run();
}

}  // extern "C"
