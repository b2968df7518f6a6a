/* The Python frames of the calling thread, innermost first, read without the interpreter's lock: a thread that stands
 * in C code is the only one that changes its own frames. NULL ends them, at once on a thread that Python does not know.
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
/* Its local variable of that index, borrowed; NULL where it is not set. */
void *crossrank_local(crossrank_frame *frame, int index);

#ifdef __cplusplus
}
#endif
