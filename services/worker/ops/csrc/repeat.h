/* M(0) to M(n - 1): one variable per row. As elements of an array the compiler would write the sums
 * of a tile back to memory in every turn of its loop. */
#ifndef GLM_REPEAT_H
#define GLM_REPEAT_H

#define REPEAT_1(M) M(0)
#define REPEAT_2(M) REPEAT_1(M) M(1)
#define REPEAT_3(M) REPEAT_2(M) M(2)
#define REPEAT_4(M) REPEAT_3(M) M(3)
#define REPEAT_5(M) REPEAT_4(M) M(4)
#define REPEAT_6(M) REPEAT_5(M) M(5)
#define REPEAT_7(M) REPEAT_6(M) M(6)
#define REPEAT_8(M) REPEAT_7(M) M(7)
#define REPEAT_9(M) REPEAT_8(M) M(8)
#define REPEAT_10(M) REPEAT_9(M) M(9)
#define REPEAT_11(M) REPEAT_10(M) M(10)
#define REPEAT_12(M) REPEAT_11(M) M(11)
#endif
