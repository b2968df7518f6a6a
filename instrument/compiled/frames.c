/* Frames of CPython 3.10 to 3.13: the layout is private to the interpreter, and differs from version to version. */
#include <Python.h>

#include "frames.h"

#if PY_VERSION_HEX < 0x030b0000

#include <frameobject.h>

typedef PyFrameObject frame_type;

static frame_type *complete(frame_type *frame) { return frame; }
static frame_type *current(PyThreadState *thread) { return thread->frame; }
static frame_type *previous(frame_type *frame) { return frame->f_back; }
static void *code(frame_type *frame) { return frame->f_code; }
static int offset(frame_type *frame) { return frame->f_lasti; }
static void *local(frame_type *frame, int index) { return frame->f_localsplus[index]; }

#elif PY_VERSION_HEX < 0x030e0000

#define Py_BUILD_CORE 1
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE

typedef _PyInterpreterFrame frame_type;

static frame_type *complete(frame_type *frame) {
  while (frame != NULL && _PyFrame_IsIncomplete(frame)) frame = frame->previous;
  return frame;
}
static frame_type *previous(frame_type *frame) { return frame->previous; }
static void *local(frame_type *frame, int index) { return frame->localsplus[index]; }
#if PY_VERSION_HEX < 0x030d0000
static frame_type *current(PyThreadState *thread) { return thread->cframe->current_frame; }
static void *code(frame_type *frame) { return frame->f_code; }
static int offset(frame_type *frame) { return (int)(frame->prev_instr - _PyCode_CODE(frame->f_code)); }
#else
static frame_type *current(PyThreadState *thread) { return thread->current_frame; }
static void *code(frame_type *frame) { return frame->f_executable; }
static int offset(frame_type *frame) { return _PyInterpreterFrame_LASTI(frame); }
#endif

#else
#error "the frames of this version of Python are not known"
#endif

crossrank_frame *crossrank_first_frame(void) {
  PyThreadState *thread = PyGILState_GetThisThreadState();
  return thread == NULL ? NULL : (crossrank_frame *)complete(current(thread));
}

crossrank_frame *crossrank_next_frame(crossrank_frame *frame) {
  return (crossrank_frame *)complete(previous((frame_type *)frame));
}

void *crossrank_code(crossrank_frame *frame) { return code((frame_type *)frame); }

int crossrank_offset(crossrank_frame *frame) { return offset((frame_type *)frame); }

void *crossrank_local(crossrank_frame *frame, int index) { return local((frame_type *)frame, index); }
