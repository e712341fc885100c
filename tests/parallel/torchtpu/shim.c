/* The library that torch_tpu loads instead of libtpu. plugin.py gives it the functions, which are written in Python.

   torch frees tensors while a Python exception is on its way, for example the one that ends a recomputation early. The
   functions must neither see nor lose it, so it is put aside while one of them runs. */
#include <stdlib.h>
#include <string.h>

enum { HEADER = 40, FUNCTIONS = 150 }; /* bytes before the functions of a PJRT_Api, and how many there may be */
typedef void *Function(void *);
int PyGILState_Ensure(void);
void PyGILState_Release(int);
void *PyErr_GetRaisedException(void);
void PyErr_SetRaisedException(void *);

static struct {
    char header[HEADER];
    Function *functions[FUNCTIONS];
} python, guarded;

static void *call(int slot, void *arguments) {
    int state = PyGILState_Ensure();
    void *exception = PyErr_GetRaisedException();
    void *error = python.functions[slot](arguments);
    PyErr_SetRaisedException(exception);
    PyGILState_Release(state);
    return error;
}

/* call_0 to call_149, because the client says by nothing but the address which function it calls. */
#define TEN(X, n) X(n##0) X(n##1) X(n##2) X(n##3) X(n##4) X(n##5) X(n##6) X(n##7) X(n##8) X(n##9)
#define FIFTY(X, a, b, c, d, e) TEN(X, a) TEN(X, b) TEN(X, c) TEN(X, d) TEN(X, e)
#define ALL(X) FIFTY(X, , 1, 2, 3, 4) FIFTY(X, 5, 6, 7, 8, 9) FIFTY(X, 10, 11, 12, 13, 14)
#define DEFINE(n) static void *call_##n(void *arguments) { return call(n, arguments); }
#define NAME(n) call_##n,
ALL(DEFINE)
static Function *const CALLS[] = {ALL(NAME)};

const void *GetPjrtApi(void) {
    const char *table = getenv("EMULATED_PJRT_API"); /* the address of the table that plugin.py made */
    size_t size;
    memcpy(&size, (const void *)strtoull(table, NULL, 16), sizeof size);
    memcpy(&python, (const void *)strtoull(table, NULL, 16), size);
    memcpy(guarded.header, python.header, HEADER);
    memcpy(guarded.functions, CALLS, sizeof CALLS);
    return &guarded;
}
