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

#ifdef __cplusplus
}
#endif
