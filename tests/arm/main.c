/* Samples from stdin, their logits to stdout; included behind an exported model. */
#include <stdio.h>

int main(void)
{
    static float in[PREDICT_INPUTS], out[PREDICT_CLASSES];
    while (fread(in, sizeof in, 1, stdin) == 1) {
        predict(in, out);
        fwrite(out, sizeof out, 1, stdout);
    }
    return 0;
}
