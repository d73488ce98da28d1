// json.h: JSON (RFC 8259), read and written, for vocabularies, configs, safetensors headers, manifests and .jsonl
// files. The reader is strict and accepts nothing beyond the standard: no comments, trailing commas, NaN, duplicate
// keys or invalid UTF-8. Json{{"step", 7}, {"loss", {0.5, "%.6f"}}}.to_text() is {"step": 7, "loss": 0.500000}.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <initializer_list>
#include <string_view>
#include <type_traits>
#include <utility>

#include "errors.h"

// ---------------------------------------------------------------------------------------------------------------------
// Writing.

// Appends the character as UTF-8.
inline void utf8_append(std::string& out, uint32_t code) {
    if (code < 0x80) return void(out += char(code));
    constexpr uint32_t first_bits[] = {0, 0xC0, 0xE0, 0xF0};
    const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;  // bytes after the first, of 6 bits each
    out += char(first_bits[more] | code >> 6 * more);
    for (int i = more - 1; i >= 0; i--) out += char(0x80 | (code >> 6 * i & 0x3F));
}

// The bytes as a JSON string, with its quotes. Bytes that are not valid UTF-8 become U+FFFD, so the result is always
// valid JSON. keep_bytes: they become \udc80 to \udcff instead, half surrogates, which Python's "surrogateescape" and
// parse_json(..., true) turn into the same bytes again: a path may have any.
inline std::string json_quote(const std::string& utf8, bool keep_bytes = false) {
    std::string out = "\"";
    for (size_t i = 0; i < utf8.size();) {
        uint32_t code;
        const int length = utf8_decode(utf8.data() + i, utf8.size() - i, &code);
        if (length == 0) out += keep_bytes ? format_text("\\udc%02x", uint8_t(utf8[i])) : "\xEF\xBF\xBD";
        else if (code == '"') out += "\\\"";
        else if (code == '\\') out += "\\\\";
        else if (code == '\n') out += "\\n";
        else if (code == '\r') out += "\\r";
        else if (code == '\t') out += "\\t";
        else if (code < 0x20) out += format_text("\\u%04x", code);
        else out.append(utf8, i, size_t(length));
        i += length ? size_t(length) : 1;
    }
    return out + "\"";
}

// ---------------------------------------------------------------------------------------------------------------------
// A value, parsed or to be written. `where` in the accessors begins the error message: the file, and the part of it
// that is being read.

struct Json {
    enum Kind { Null, Bool, Number, String, Array, Object };
    // {"a": 1, "b": 2}; {"a":1,"b":2}; or SPACED, but with a line for each member.
    enum Style { SPACED, COMPACT, LINES };
    using Member = std::pair<std::string, Json>;

    Kind kind = Null;
    bool is_true = false;           // of a Bool
    bool is_integer = false;        // a Number that is written as an integer and fits an int64
    bool keeps_bytes = false;       // a String to be written so, see json_quote
    double number_value = 0;        // of a Number
    int64_t integer_value = 0;      // of a Number with is_integer
    std::string text;               // of a String, UTF-8; of a Number, as it is written
    std::vector<Json> items;        // of an Array; of an Object, the values in the order of the file
    std::vector<std::string> keys;  // of an Object: keys[i] is the key of items[i]
    uint64_t offset = 0;            // byte of the file where the value begins

    Json() = default;
    explicit Json(Kind empty) : kind(empty) {}
    Json(const char* utf8) : kind(String), text(utf8) {}
    Json(std::string utf8, bool bytes = false) : kind(String), keeps_bytes(bytes), text(std::move(utf8)) {}
    // An integer, or true or false.
    template <class T, std::enable_if_t<std::is_integral_v<T>, int> = 0>
    Json(T x) : kind(std::is_same_v<T, bool> ? Bool : Number), is_true(x), number_value(double(x)) {
        if (kind == Bool) return;
        is_integer = true;
        integer_value = int64_t(x);
        text = std::to_string(x);
    }
    // A number as printf writes it. JSON has no NaN: what is not finite becomes null.
    Json(double x, const char* format) {
        if (!std::isfinite(x)) return;
        kind = Number;
        text = format_text(format, x);
        number_value = std::strtod(text.c_str(), nullptr);
    }
    Json(std::initializer_list<Member> members) : kind(Object) { add(members); }

    Json& add(const std::string& key, Json value) {
        keys.push_back(key);
        items.push_back(std::move(value));
        return *this;
    }
    Json& add(std::initializer_list<Member> members) {
        for (const auto& [key, value] : members) add(key, value);
        return *this;
    }
    // An array; and one of numbers that printf writes.
    template <class Values>
    static Json list(const Values& values) {
        Json all(Array);
        for (const auto& value : values) all.items.emplace_back(value);
        return all;
    }
    static Json numbers(const std::vector<double>& values, const char* format) {
        Json all(Array);
        for (const double x : values) all.items.emplace_back(x, format);
        return all;
    }

    std::string to_text(Style style = SPACED) const {
        if (kind == String) return json_quote(text, keeps_bytes);
        if (kind == Number) return text;
        if (kind == Bool) return is_true ? "true" : "false";
        if (kind == Null) return "null";
        const char* const comma = style == COMPACT ? "," : style == LINES ? ",\n " : ", ";
        const char* const colon = style == COMPACT ? ":" : ": ";
        std::string all;
        for (size_t i = 0; i < items.size(); i++) {
            all += i ? comma : "";
            if (kind == Object) all += json_quote(keys[i]) + colon;
            all += items[i].to_text(style == COMPACT ? COMPACT : SPACED);
        }
        return kind == Object ? "{" + all + "}" : "[" + all + "]";
    }

    static const char* name(Kind kind) {
        static const char* const names[] = {"null", "true or false", "a number", "a string", "an array", "an object"};
        return names[kind];
    }

    const Json& require(Kind wanted, const std::string& where) const {
        if (kind != wanted) fail("%s: byte %d: found %s, expected %s", where, offset, name(kind), name(wanted));
        return *this;
    }

    // The value of the key, or null if there is no such key or this is not an object. Takes time linear in the keys.
    const Json* find(const std::string& key) const {
        for (size_t i = 0; i < keys.size(); i++)
            if (keys[i] == key) return &items[i];
        return nullptr;
    }

    const Json& get(const std::string& key, const std::string& where) const {
        require(Object, where);
        const Json* value = find(key);
        if (!value) fail("%s: byte %d: the object has no key %s", where, offset, json_quote(key));
        return *value;
    }

    // This value, which must be of the kind that the function is named after.
    int64_t integer(const std::string& where) const {
        require(Number, where);
        if (!is_integer)
            fail("%s: byte %d: found %.17g, expected a whole number of 64 bits", where, offset, number_value);
        return integer_value;
    }
    // The same, and 2.0 up to 2^53, as programs write it that keep numbers as doubles.
    int64_t whole_number(const std::string& where) const {
        const double number = require(Number, where).number_value;
        const bool is_whole = std::fabs(number) <= std::ldexp(1, 53) && std::floor(number) == number;
        return is_whole && !is_integer ? int64_t(number) : integer(where);
    }
    double number(const std::string& where) const { return require(Number, where).number_value; }
    const std::string& string(const std::string& where) const { return require(String, where).text; }
    const std::vector<Json>& array(const std::string& where) const { return require(Array, where).items; }

    // The same for the value of a key of this object.
    int64_t integer(const std::string& key, const std::string& where) const {
        return get(key, where).integer(where + ": " + key);
    }
    double number(const std::string& key, const std::string& where) const {
        return get(key, where).number(where + ": " + key);
    }
    const std::string& string(const std::string& key, const std::string& where) const {
        return get(key, where).string(where + ": " + key);
    }
    const std::vector<Json>& array(const std::string& key, const std::string& where) const {
        return get(key, where).array(where + ": " + key);
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// The parser: recursive descent, one function for each rule of the grammar, from its leaves up to parse().

struct JsonParser {
    // Limits for hostile files: nesting must not exhaust the stack, and "[0,0,0 ..." must not fill the memory, where a
    // value takes 50 times its two bytes.
    static constexpr int max_depth = 100;
    static constexpr size_t max_values = 1 << 20;

    const std::string& bytes;
    const std::string& where;
    const uint64_t first_byte;  // offset of bytes[0] in the file
    const bool has_bytes;       // as json_quote(..., true) writes them
    size_t at = 0, values = 0;

    int peek() const { return at < bytes.size() ? static_cast<unsigned char>(bytes[at]) : -1; }

    void skip_space() { at = std::min(bytes.find_first_not_of(" \t\n\r", at), bytes.size()); }

    [[noreturn]] void error(const char* expected) const {
        std::string found = "the end of the text";
        if (at < bytes.size()) {
            const char c = bytes[at];
            found = c > 0x20 && c < 0x7F ? format_text("'%s'", c) : format_text("byte 0x%02x", uint8_t(c));
        }
        fail("%s: byte %d: not valid JSON: found %s, expected %s", where, first_byte + at, found, expected);
    }

    void parse_digits() {
        if (!(peek() >= '0' && peek() <= '9')) error("a digit");
        while (peek() >= '0' && peek() <= '9') at++;
    }

    void parse_number(Json& value) {
        const size_t begin = at;
        bool whole = true;
        if (peek() == '-') at++;
        if (peek() == '0') {
            at++;
            if (peek() >= '0' && peek() <= '9') error("no digit after a leading zero");
        } else {
            parse_digits();
        }
        if (peek() == '.') {
            at++;
            whole = false;
            parse_digits();
        }
        if (peek() == 'e' || peek() == 'E') {
            at++;
            whole = false;
            if (peek() == '+' || peek() == '-') at++;
            parse_digits();
        }
        const std::string digits = bytes.substr(begin, at - begin);
        value.kind = Json::Number;
        value.number_value = std::strtod(digits.c_str(), nullptr);
        if (std::isinf(value.number_value))
            fail("%s: byte %d: the number is beyond a double's range", where, value.offset);
        errno = 0;
        value.text = digits;
        value.integer_value = whole ? std::strtoll(digits.c_str(), nullptr, 10) : 0;
        value.is_integer = whole && errno == 0;
        if (!value.is_integer) value.integer_value = 0;
    }

    uint32_t parse_hex4() {
        uint32_t code = 0;
        for (int i = 0; i < 4; i++, at++) {
            const int c = peek();
            if (c >= '0' && c <= '9') code = code * 16 + uint32_t(c - '0');
            else if (c >= 'a' && c <= 'f') code = code * 16 + uint32_t(c - 'a' + 10);
            else if (c >= 'A' && c <= 'F') code = code * 16 + uint32_t(c - 'A' + 10);
            else error("four hexadecimal digits");
        }
        return code;
    }

    // \uXXXX, or two of them; `at` is at the u.
    void parse_unicode_escape(std::string& out) {
        const size_t escape = at++ - 1;  // the backslash
        uint32_t code = parse_hex4();
        // the first half of a surrogate pair
        if (code >= 0xD800 && code <= 0xDBFF && bytes.compare(at, 2, "\\u") == 0) {
            at += 2;
            const uint32_t low = parse_hex4();
            code = low >= 0xDC00 && low <= 0xDFFF ? 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00) : 0xD800;
        }
        if (has_bytes && code >= 0xDC80 && code <= 0xDCFF) return void(out += char(code & 0xFF));
        if (code >= 0xD800 && code <= 0xDFFF)
            fail("%s: byte %d: not valid JSON: an escape that is only half of a surrogate pair", where,
                 first_byte + escape);
        utf8_append(out, code);
    }

    void parse_escape(std::string& out) {
        constexpr std::string_view letters = "\"\\/bfnrt", meanings = "\"\\/\b\f\n\r\t";
        if (peek() == 'u') return parse_unicode_escape(out);
        const size_t which = letters.find(char(peek()));
        if (which == letters.npos) error("one of \" \\ / b f n r t u after a backslash");
        out += meanings[which];
        at++;
    }

    std::string parse_string() {
        std::string out;
        at++;
        while (true) {
            const size_t run = at;  // plain characters are copied in runs
            while (at < bytes.size()) {
                const unsigned char c = static_cast<unsigned char>(bytes[at]);
                if (c == '"' || c == '\\' || c < 0x20) break;
                uint32_t code;
                const int length = c < 0x80 ? 1 : utf8_decode(bytes.data() + at, bytes.size() - at, &code);
                if (length == 0) error("valid UTF-8");
                at += size_t(length);
            }
            out.append(bytes, run, at - run);
            if (peek() == '"') {
                at++;
                return out;
            }
            if (peek() != '\\')
                error(at < bytes.size() ? "an escape such as \\n in place of a control character" : "'\"'");
            at++;
            parse_escape(out);
        }
    }

    void parse_key(Json& object) {
        skip_space();
        if (peek() != '"') error("a key in double quotes");
        object.keys.push_back(parse_string());
        skip_space();
        if (peek() != ':') error("':'");
        at++;
    }

    // An array or an object.
    void parse_items(Json& value, int depth) {
        const bool is_object = bytes[at++] == '{';
        const char end = is_object ? '}' : ']';
        value.kind = is_object ? Json::Object : Json::Array;
        skip_space();
        if (peek() == end) return void(at++);
        do {
            if (is_object) parse_key(value);
            value.items.push_back(parse_value(depth));
            skip_space();
            if (peek() != ',' && peek() != end) error(is_object ? "',' or '}'" : "',' or ']'");
        } while (bytes[at++] == ',');
        std::vector<const std::string*> sorted;
        for (const std::string& key : value.keys) sorted.push_back(&key);
        std::sort(sorted.begin(), sorted.end(), [](const std::string* a, const std::string* b) { return *a < *b; });
        for (size_t i = 1; i < sorted.size(); i++)
            if (*sorted[i] == *sorted[i - 1])
                fail("%s: byte %d: the object has the key %s twice", where, value.offset, json_quote(*sorted[i]));
    }

    Json parse_value(int depth) {
        skip_space();
        Json value;
        value.offset = first_byte + at;
        if (++values > max_values) fail("%s: byte %d: JSON of more than %d values", where, value.offset, max_values);
        const int c = peek();
        if (c == '{' || c == '[') {
            if (depth == max_depth)
                fail("%s: byte %d: JSON nested deeper than %d levels", where, first_byte + at, max_depth);
            parse_items(value, depth + 1);
        } else if (c == '"') {
            value.kind = Json::String;
            value.text = parse_string();
            value.keeps_bytes = has_bytes;
        } else if (c == '-' || (c >= '0' && c <= '9')) {
            parse_number(value);
        } else if (bytes.compare(at, 4, "null") == 0) {
            at += 4;
        } else if (bytes.compare(at, 4, "true") == 0) {
            value.kind = Json::Bool;
            value.is_true = true;
            at += 4;
        } else if (bytes.compare(at, 5, "false") == 0) {
            value.kind = Json::Bool;
            at += 5;
        } else {
            error("a value");
        }
        return value;
    }

    Json parse() {
        if (bytes.compare(0, 3, "\xEF\xBB\xBF") == 0) at = 3;  // a byte order mark, which Windows' editors write
        Json value = parse_value(0);
        skip_space();
        if (at < bytes.size()) error("the end of the text");
        return value;
    }
};

// The one value in the text. Errors name `where` (the file, perhaps the line) and the byte of the file; first_byte is
// the offset of the text in it. has_bytes: see json_quote.
inline Json parse_json(const std::string& text, const std::string& where, uint64_t first_byte = 0,
                       bool has_bytes = false) {
    return JsonParser{text, where, first_byte, has_bytes}.parse();
}

// A file that this program wrote, with paths of any bytes in it: run.json, a manifest.
inline Json parse_own_json(const std::string& text, const std::string& where) {
    return parse_json(text, where, 0, true);
}
