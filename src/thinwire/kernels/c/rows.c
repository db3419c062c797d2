/* One step of the optimizers of many models, in one pass over memory: rows [models, n], each with its own numbers.

   A model that is not going is not touched. Columns from `begin` to `end` alone are moved, so that several threads may
   share the work. A compiler makes vectors of these loops; what does not depend on the column it asks but once. */

#define ADAM_NUMBERS 9
#define SGD_NUMBERS 5

/* Which elements of which rows are moved, and by what numbers. */
typedef struct {
    int64_t models, n, begin, end;
    const double *numbers;
    const uint8_t *going;
} span;

#define ADAM(NAME, REAL, ROOT)                                                                                         \
    static void NAME##_row(                                                                                            \
        REAL *restrict x, const REAL *restrict gradient, REAL *restrict mean, REAL *restrict square,                   \
        REAL *restrict most, int64_t count, const double *numbers                                                      \
    ) {                                                                                                                \
        const REAL shrink = (REAL)numbers[0], decay = (REAL)numbers[1], share = (REAL)numbers[2],                      \
                   rest = (REAL)numbers[3], keep = (REAL)numbers[4], take = (REAL)numbers[5],                          \
                   scale = (REAL)numbers[6], floor = (REAL)numbers[7], step = (REAL)numbers[8];                        \
        for (int64_t i = 0; i < count; i++) {                                                                          \
            REAL g = decay != 0 ? gradient[i] + decay * x[i] : gradient[i];                                            \
            REAL way = g - mean[i];                                                                                    \
            REAL m = share < (REAL)0.5 ? mean[i] + share * way : g - rest * way;                                       \
            REAL v = keep * square[i] + take * (g * g), w = v;                                                         \
            mean[i] = m;                                                                                               \
            square[i] = v;                                                                                             \
            if (most) most[i] = w = (most[i] >= v || most[i] != most[i]) ? most[i] : v;                                \
            x[i] = x[i] * shrink - step * (m / (ROOT(w) * scale + floor));                                             \
        }                                                                                                              \
    }                                                                                                                  \
    void NAME(REAL *x, const REAL *gradient, REAL *mean, REAL *square, REAL *most, const span *s) {                    \
        for (int64_t row = 0, at = s->begin; row < s->models; row++, at += s->n)                                       \
            if (s->going[row])                                                                                         \
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
        const REAL decay = (REAL)numbers[0], keep = (REAL)numbers[1], take = (REAL)numbers[2],                         \
                   ahead = (REAL)numbers[3], step = (REAL)numbers[4];                                                  \
        for (int64_t i = 0; i < count; i++) {                                                                          \
            REAL g = decay != 0 ? gradient[i] + decay * x[i] : gradient[i];                                            \
            if (keep != 0) {                                                                                           \
                momentum[i] = keep * momentum[i] + take * g;                                                           \
                g = ahead != 0 ? g + keep * momentum[i] : momentum[i];                                                 \
            }                                                                                                          \
            x[i] = x[i] - step * g;                                                                                    \
        }                                                                                                              \
    }                                                                                                                  \
    void NAME(REAL *x, const REAL *gradient, REAL *momentum, const span *s) {                                          \
        for (int64_t row = 0, at = s->begin; row < s->models; row++, at += s->n)                                       \
            if (s->going[row])                                                                                         \
                NAME##_row(                                                                                            \
                    x + at, gradient + at, momentum + at, s->end - s->begin, s->numbers + row * SGD_NUMBERS);          \
    }

SGD(thinwire_sgd_rows, float)
SGD(thinwire_sgd_rows_double, double)
