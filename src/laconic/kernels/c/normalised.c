/* Layer normalisation of many models: rows [models, count, n], each model with its own gain and shift [models, n]. */

/* Blocks of eight vectors by neighbours, one block after another; then the lanes, halves first. */
static float dot(const float *x, const float *y, int64_t n) {
    floats sum = {};
    int64_t i = 0;
    for (; i + 8 * LANES <= n; i += 8 * LANES) {
        floats row[8];
        for (int k = 0; k < 8; k++) row[k] = load(x + i + k * LANES) * load(y + i + k * LANES);
        sum = sum + (((row[0] + row[1]) + (row[2] + row[3])) + ((row[4] + row[5]) + (row[6] + row[7])));
    }
    for (; i + LANES <= n; i += LANES) sum = sum + load(x + i) * load(y + i);
    if (i < n) sum = sum + load_some(x + i, n - i) * load_some(y + i, n - i);
    float lanes[LANES];
    store(lanes, sum);
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++) lanes[lane] = lanes[lane] + lanes[lane + half];
    return lanes[0];
}

static void normalise_row(
    const float *restrict x, const float *restrict ones, const float *restrict gain, const float *restrict shift,
    float *restrict out, float *mean, float *scale, int64_t n, float eps
) {
    float middle = *mean = dot(x, ones, n) / (float)n;
    for (int64_t i = 0; i < n; i++) out[i] = x[i] - middle;
    float factor = *scale = 1.0f / __builtin_sqrtf(dot(out, out, n) / (float)n + eps);
    for (int64_t i = 0; i < n; i++) out[i] = out[i] * factor * gain[i] + shift[i];
}

/* `ones` are n of them. */
void laconic_layer_norm(
    const float *x, const float *ones, const float *gain, const float *shift, float *out, float *means, float *scales,
    int64_t models, int64_t count, int64_t n, float eps
) {
    for (int64_t row = 0; row < models * count; row++) {
        int64_t at = row * n, own = row / count * n;
        normalise_row(x + at, ones, gain + own, shift + own, out + at, means + row, scales + row, n, eps);
    }
}

static void return_row(
    const float *restrict gradient, const float *restrict x, const float *restrict ones, const float *restrict gain,
    float mean, float scale, float *restrict of_x, float *restrict of_gain, float *restrict of_shift,
    float *restrict normal, int64_t n
) {
    for (int64_t i = 0; i < n; i++) {
        normal[i] = (x[i] - mean) * scale;
        of_x[i] = gradient[i] * gain[i];
        of_gain[i] = of_gain[i] + gradient[i] * normal[i];
        of_shift[i] = of_shift[i] + gradient[i];
    }
    float first = dot(of_x, ones, n) / (float)n, second = dot(of_x, normal, n) / (float)n;
    for (int64_t i = 0; i < n; i++) of_x[i] = scale * (of_x[i] - first - normal[i] * second);
}

/* of_gain and of_shift are added to; `normal` is room for one row. */
void laconic_layer_norm_back(
    const float *gradient, const float *x, const float *ones, const float *gain, const float *means,
    const float *scales, float *of_x, float *of_gain, float *of_shift, float *normal, int64_t models, int64_t count,
    int64_t n
) {
    for (int64_t row = 0; row < models * count; row++) {
        int64_t at = row * n, own = row / count * n;
        return_row(
            gradient + at, x + at, ones, gain + own, means[row], scales[row], of_x + at, of_gain + own, of_shift + own,
            normal, n);
    }
}
