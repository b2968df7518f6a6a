/* The Python frames of the calling thread, innermost first, read without the interpreter's lock: while a thread runs C
 * code, only that thread changes its frames. NULL marks the end; a thread unknown to Python has no frames.
 */
#pragma once

#ifdef __cplusplus
extern "C" {
#endif

typedef struct crossrank_frame crossrank_frame;

crossrank_frame *crossrank_first_frame(void);
crossrank_frame *crossrank_next_frame(crossrank_frame *frame);
/* Its code object, borrowed. */
void *crossrank_code(crossrank_frame *frame);
/* Offset of its current instruction; equal offsets are the same place in the code. */
int crossrank_offset(crossrank_frame *frame);
/* Its local variable with that index, borrowed; NULL if it is not set. */
void *crossrank_local(crossrank_frame *frame, int index);


typedef struct {
  char name[1024], file[1024]; /* ASCII */
  int line;
} crossrank_place;

/* Copies up to `most` frames of a thread state of Python, innermost first, without the interpreter's lock, and returns
 * how many. Only one thread of the process may call it. The frames may be those of no single moment. */
int crossrank_copy_frames(void *thread, int most, crossrank_place *into);

#ifdef __cplusplus
}
#endif
