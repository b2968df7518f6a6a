/* Frames of CPython 3.10 to 3.13: the layout is private to the interpreter, and differs from version to version. */
#define _GNU_SOURCE
#include <Python.h>

#include <stdint.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "frames.h"

#if PY_VERSION_HEX < 0x030b0000

#include <frameobject.h>

typedef PyFrameObject frame_type;

#define FRAME_END f_localsplus
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
#define FRAME_END localsplus

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

/* --- the frames of another thread, which may change at any moment ----------------------------------------------------
 *
 * The kernel copies the memory, and fails where there is none: a direct read could end the process.
 */

enum { MOST_TEXT = 1024, MOST_TABLE = 1 << 16 };

static int copy(const void *from, void *into, size_t size) {
  struct iovec local = {into, size}, remote = {(void *)(uintptr_t)from, size};
  return from != NULL && process_vm_readv(getpid(), &local, 1, &remote, 1, 0) == (ssize_t)size;
}

/* Copies an ASCII text; other texts have other layouts. */
static int copy_text(PyObject *from, char *into) {
  PyASCIIObject head;
  if (!copy(from, &head, sizeof head) || !head.state.compact || !head.state.ascii) return 0;
  Py_ssize_t length = head.length < MOST_TEXT - 1 ? head.length : MOST_TEXT - 1;
  into[length] = 0;
  return length >= 0 && copy((char *)from + sizeof head, into, (size_t)length);
}

static int line_of(PyCodeObject *code, int instruction) {
  static char table[MOST_TABLE + sizeof(PyBytesObject)]; /* of the one thread that calls this */
  PyBytesObject head;
  if (!copy(code->co_linetable, &head, offsetof(PyBytesObject, ob_sval))) return 0;
  if (Py_SIZE(&head) < 0 || Py_SIZE(&head) > MOST_TABLE) return 0;
  if (!copy(code->co_linetable, table, offsetof(PyBytesObject, ob_sval) + (size_t)Py_SIZE(&head))) return 0;
  code->co_linetable = (PyObject *)table;
#if PY_VERSION_HEX >= 0x030b0000 && PY_VERSION_HEX < 0x030c0000
  code->_co_linearray = NULL;
#endif
  return PyCode_Addr2Line(code, instruction * (int)sizeof(_Py_CODEUNIT));
}

int crossrank_copy_frames(void *thread, int most, crossrank_place *into) {
  PyThreadState state;
  if (!copy(thread, &state, sizeof state)) return 0;
#if PY_VERSION_HEX >= 0x030b0000 && PY_VERSION_HEX < 0x030d0000
  _PyCFrame entry;
  if (!copy(state.cframe, &entry, sizeof entry)) return 0;
  state.cframe = &entry;
#endif
  int found = 0;
  frame_type here, *next = current(&state);
  for (int looked = 0; found < most && looked < 4 * most && copy(next, &here, offsetof(frame_type, FRAME_END)); looked++) {
    PyCodeObject own, *of = (PyCodeObject *)code(&here);
    int instruction = offset(&here);
    next = previous(&here);
    if (!copy(of, &own, sizeof own) || Py_TYPE((PyObject *)&own) != &PyCode_Type || instruction < 0) continue;
    crossrank_place *place = &into[found];
    if (!copy_text(own.co_name, place->name) || !copy_text(own.co_filename, place->file)) continue;
    place->line = line_of(&own, instruction);
    found++;
  }
  return found;
}
