// text.h: text that is safe to print: UTF-8, messages out of values of any type, words for a shell.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

// The text of a macro's value.
#define QUOTED(word) #word
#define QUOTED_VALUE(macro) QUOTED(macro)

// ---------------------------------------------------------------------------------------------------------------------
// UTF-8 (RFC 3629: no overlong forms, no surrogates, nothing above U+10FFFF), and text that is safe to print.

// Decodes the character at s[0], of which n bytes may be read: returns its length in bytes (1 to 4) and its code point
// in *code, or 0 if the bytes are not valid UTF-8.
inline int utf8_decode(const char* s, size_t n, uint32_t* code) {
    if (n == 0) return 0;
    const auto byte = [&](int i) { return uint32_t(static_cast<unsigned char>(s[i])); };
    const uint32_t first = byte(0);
    const int length = first < 0x80 ? 1 : first < 0xC2 ? 0 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : first < 0xF5 ? 4 : 0;
    if (length == 0 || size_t(length) > n) return 0;
    constexpr uint32_t first_bits[] = {0, 0x7F, 0x1F, 0x0F, 0x07}, least[] = {0, 0, 0x80, 0x800, 0x10000};
    *code = first & first_bits[length];
    for (int i = 1; i < length; i++) {
        if ((byte(i) & 0xC0) != 0x80) return 0;
        *code = *code << 6 | (byte(i) & 0x3F);
    }
    if (*code < least[length] || *code > 0x10FFFF || (*code >= 0xD800 && *code <= 0xDFFF)) return 0;
    return length;
}

// Makes any text safe to print in a message: one line that cannot upset the terminal, whatever a file, an option or a
// variable put into it. The bytes of control characters, of Unicode's line separators and direction marks, and of
// invalid UTF-8 are shown as \xNN; a long text loses its middle.
inline std::string printable(const std::string& text) {
    constexpr size_t limit = 2000, tail = 500;
    size_t gap_begin = text.size(), gap_end = text.size();
    if (text.size() > limit) {
        const auto in_character = [&](size_t i) { return (text[i] & 0xC0) == 0x80; };  // not at its first byte
        gap_begin = limit - tail;
        gap_end = text.size() - tail;
        for (int back = 0; back < 3 && in_character(gap_end); back++) gap_end--;
    }
    std::string out;
    for (size_t i = 0; i < text.size();) {
        if (i >= gap_begin && i < gap_end) {
            out += " ... ";
            i = gap_end;
        }
        uint32_t code = 0;
        const int length = utf8_decode(text.data() + i, text.size() - i, &code);
        const bool hidden = code < 0x20 || (code >= 0x7F && code < 0xA0) || code == 0xFEFF ||
                            (code >= 0x200B && code <= 0x200F) || (code >= 0x2028 && code <= 0x202E) ||
                            (code >= 0x2060 && code <= 0x206F);
        const size_t end = i + size_t(length ? length : 1);
        for (; i < end; i++) {
            const unsigned char byte = static_cast<unsigned char>(text[i]);
            if (length == 0 || hidden)
                out += std::string("\\x") + "0123456789abcdef"[byte >> 4] + "0123456789abcdef"[byte & 15];
            else out += text[i];
        }
    }
    return out;
}

// ---------------------------------------------------------------------------------------------------------------------
// Messages.

// A value in a message. It knows its type and size: %d prints any integer.
struct Value {
    enum { TEXT, INTEGER, REAL } kind;
    const char* text = letter;  // somebody else's, who keeps it as long as the message is made
    char letter[2] = {};
    long long integer = 0;
    bool is_unsigned = false;
    double real = 0;

    Value(const char* value) : kind(TEXT), text(value) {}
    Value(const std::string& value) : kind(TEXT), text(value.c_str()) {}
    Value(char value) : kind(TEXT), letter{value} {}
    Value(const Value&) = delete;
    template <class T, class = std::enable_if_t<std::is_arithmetic_v<T> || std::is_enum_v<T>>>
    Value(T value) : kind(std::is_floating_point_v<T> ? REAL : INTEGER), is_unsigned(std::is_unsigned_v<T>) {
        if constexpr (std::is_floating_point_v<T>) real = value;
        else integer = static_cast<long long>(value);
    }
};

// format with its conversions, which are printf's, replaced by the values: %s of a text, %d or %x of an integer,
// %g, %f or %e of a real number; no letters for sizes, as in %lld.
inline std::string format_values(const char* format, std::initializer_list<Value> values) {
    std::string all;
    const Value* value = values.begin();
    const auto add = [&](const std::string& conversion, auto x) {
        std::string text(size_t(std::snprintf(nullptr, 0, conversion.c_str(), x)), '\0');
        std::snprintf(&text[0], text.size() + 1, conversion.c_str(), x);
        all += text;
    };
    for (const char* c = format; *c; c++) {
        if (*c != '%' || *++c == '%') {
            all += *c;
            continue;
        }
        const size_t digits = std::strspn(c, "-+ .0123456789");
        const std::string begin = "%" + std::string(c, digits);
        c += digits;
        const char letter = *c;
        const auto kind = letter == 's' ? Value::TEXT : std::strchr("gfe", letter) ? Value::REAL : Value::INTEGER;
        if (value == values.end() || value->kind != kind || !std::strchr("sgfeduxX", letter))
            throw std::logic_error(std::string("the values of a message do not fit into '") + format + "'");
        if (kind == Value::TEXT) add(begin + "s", value->text);
        else if (kind == Value::INTEGER)
            add(begin + "ll" + (letter == 'd' && value->is_unsigned ? 'u' : letter), value->integer);
        else add(begin + letter, value->real);
        value++;
    }
    if (value != values.end()) throw std::logic_error(std::string("more values than conversions in '") + format + "'");
    return all;
}

template <class... Values>
std::string format_text(const char* format, const Values&... values) {
    return format_values(format, {values...});
}

// What a run says, on stdout.
template <class... Values>
void print(const char* format, const Values&... values) {
    std::fputs(format_values(format, {values...}).c_str(), stdout);
}

// A path as it can be pasted into a shell, and seen on a terminal: what a terminal would obey, and bytes that are no
// UTF-8, take the $'\x1b' of bash and zsh.
inline std::string shell_word(const std::string& path) {
    if (printable(path) != path) {
        std::string word = "$'";
        for (const char c : path) {
            if (c == '\'' || c == '\\') word += '\\';
            word += uint8_t(c) >= ' ' && uint8_t(c) < 127 ? std::string(1, c) : format_text("\\x%02x", uint8_t(c));
        }
        return word + "'";
    }
    if (path.find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-+=.,:/@%") ==
        std::string::npos)
        return path;
    std::string word = "'";
    for (char c : path) word += c == '\'' ? "'\\''" : std::string(1, c);
    return word + "'";
}

// What stands between the blanks of a text.
inline std::vector<std::string> split_words(const std::string& text) {
    std::istringstream in(text);
    return {std::istream_iterator<std::string>(in), {}};
}
inline std::string joined_words(const std::vector<std::string>& words, const char* between) {
    std::string all;
    for (const std::string& word : words) all += (all.empty() ? "" : between) + word;
    return all;
}
// The row of this name in a table of them; null where there is none.
template <class Row, size_t ROWS>
const Row* row_named(const Row (&table)[ROWS], const std::string& name) {
    const auto found = std::find_if(table, table + ROWS, [&](const Row& row) { return name == row.name; });
    return found == table + ROWS ? nullptr : found;
}
// "1 rank", "2 ranks".
inline std::string counted(int64_t n, const std::string& noun) {
    return std::to_string(n) + " " + noun + (n == 1 ? "" : "s");
}
