/* SPDX-License-Identifier: Apache-2.0 */
/* One optimizer step of many models in one pass over memory: rows [models, n], each with its own numbers.

   Rows of models that are not active are unchanged. Only columns from `begin` to `end` are updated, so that several
   threads may share the work. The compiler vectorises these loops, and hoists the branches that do not depend on the
   column. */

#define ADAM_NUMBERS 9
#define SGD_NUMBERS 5

/* The rows, the range of columns, and each row's numbers. */
typedef struct {
    int64_t models, n, begin, end;
    const double *numbers;
    const uint8_t *active;
} span;

#define ADAM(NAME, REAL, ROOT)                                                                                         \
    static void NAME##_row(                                                                                            \
        REAL *restrict x, const REAL *restrict gradient, REAL *restrict mean, REAL *restrict square,                   \
        REAL *restrict most, int64_t count, const double *numbers                                                      \
    ) {                                                                                                                \
        const REAL shrink = (REAL)numbers[0], decay = (REAL)numbers[1], weight = (REAL)numbers[2],                     \
                   beta1 = (REAL)numbers[3], beta2 = (REAL)numbers[4], square_weight = (REAL)numbers[5],               \
                   scale = (REAL)numbers[6], eps = (REAL)numbers[7], rate = (REAL)numbers[8];                          \
        for (int64_t i = 0; i < count; i++) {                                                                          \
            REAL g = decay != 0 ? gradient[i] + decay * x[i] : gradient[i];                                            \
            REAL difference = g - mean[i];                                                                             \
            REAL m = weight < (REAL)0.5 ? mean[i] + weight * difference : g - beta1 * difference;                      \
            REAL v = beta2 * square[i] + square_weight * (g * g), w = v;                                               \
            mean[i] = m;                                                                                               \
            square[i] = v;                                                                                             \
            if (most) most[i] = w = (most[i] >= v || most[i] != most[i]) ? most[i] : v;                                \
            x[i] = x[i] * shrink - rate * (m / (ROOT(w) * scale + eps));                                               \
        }                                                                                                              \
    }                                                                                                                  \
    void NAME(REAL *x, const REAL *gradient, REAL *mean, REAL *square, REAL *most, const span *s) {                    \
        for (int64_t row = 0, at = s->begin; row < s->models; row++, at += s->n)                                       \
            if (s->active[row])                                                                                        \
                NAME##_row(                                                                                            \
                    x + at, gradient + at, mean + at, square + at, most ? most + at : 0, s->end - s->begin,            \
                    s->numbers + row * ADAM_NUMBERS);                                                                  \
    }

ADAM(thinwire_adam_rows, float, __builtin_sqrtf)
ADAM(thinwire_adam_rows_double, double, __builtin_sqrt)

#define SGD(NAME, REAL)                                                                                                \
    static void NAME##_row(                                                                                            \
        REAL *restrict x, const REAL *restrict gradient, REAL *restrict momentum, int64_t count, const double *numbers \
    ) {                                                                                                                \
        const REAL decay = (REAL)numbers[0], mu = (REAL)numbers[1], weight = (REAL)numbers[2],                         \
                   nesterov = (REAL)numbers[3], rate = (REAL)numbers[4];                                               \
        for (int64_t i = 0; i < count; i++) {                                                                          \
            REAL g = decay != 0 ? gradient[i] + decay * x[i] : gradient[i];                                            \
            if (mu != 0) {                                                                                             \
                momentum[i] = mu * momentum[i] + weight * g;                                                           \
                g = nesterov != 0 ? g + mu * momentum[i] : momentum[i];                                                \
            }                                                                                                          \
            x[i] = x[i] - rate * g;                                                                                    \
        }                                                                                                              \
    }                                                                                                                  \
    void NAME(REAL *x, const REAL *gradient, REAL *momentum, const span *s) {                                          \
        for (int64_t row = 0, at = s->begin; row < s->models; row++, at += s->n)                                       \
            if (s->active[row])                                                                                        \
                NAME##_row(                                                                                            \
                    x + at, gradient + at, momentum + at, s->end - s->begin, s->numbers + row * SGD_NUMBERS);          \
    }

SGD(thinwire_sgd_rows, float)
SGD(thinwire_sgd_rows_double, double)
