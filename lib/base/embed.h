// embed.h: files of the source tree within the program; the assembler copies them in. Paths are from the folder of the
// Makefile, which names these files as what the program depends on. Used by export.h, inspect.h and report.cpp.
#pragma once

#if defined(__CUDA_ARCH__) || defined(__HIP_DEVICE_COMPILE__)
#define EMBED_BYTES(symbol, path)  // nvcc compiles this file for the device too
#elif defined(__APPLE__)
// Apple's linker moves each symbol's bytes as one piece; .alt_entry keeps the end with what stands before it.
#define EMBED_BYTES(symbol, path)                                                                               \
    __asm__(".pushsection __TEXT,__const\n" symbol ": .incbin \"" path "\"\n.alt_entry " symbol "_end\n" symbol \
            "_end:\n.popsection\n");
#else
#define EMBED_BYTES(symbol, path) \
    __asm__(".pushsection .rodata\n" symbol ": .incbin \"" path "\"\n" symbol "_end: .popsection\n");
#endif
// Hidden: the symbols are local to the file, and on aarch64 the linker would otherwise give both of them one address.
#define EMBEDDED __attribute__((visibility("hidden")))
// The bytes are file_NAME .. file_NAME_end.
#define EMBED_FILE(name, path)                                       \
    EMBED_BYTES("file_" #name, path)                                 \
    extern EMBEDDED const char file_##name[] __asm__("file_" #name); \
    extern EMBEDDED const char file_##name##_end[] __asm__("file_" #name "_end");
