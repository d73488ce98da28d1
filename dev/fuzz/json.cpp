// json.cpp: parse_json on any text. Accepted text is written again, and must read the same.
#include "../../lib/base/json.h"
#include "fuzz.h"

std::vector<std::string> seeds() {
    return {"{\"a\": [1, -0.5e3, true, false, null], \"b\": {\"c\": \"\\u00e9\\ud83d\\ude00\\n\\\"\\\\\\/\"}}",
            "[]",
            "{}",
            "-12345678901234567890",
            "9223372036854775807",
            "[[[[[[0]]]]]]",
            "\"\xC3\xA9\xE4\xB8\xAD\xF0\x9F\x98\x80\"",
            " \t\r\n1.25E-7 ",
            "{\"\": 0, \" \": \"\"}",
            "1e400",
            "-9223372036854775808"};
}

static std::string written(const Json& v) {
    std::string out;
    switch (v.kind) {
        case Json::Null: return "null";
        case Json::Bool: return v.is_true ? "true" : "false";
        case Json::Number: return v.is_integer ? std::to_string(v.integer_value) : format_text("%.17e", v.number_value);
        case Json::String: return json_quote(v.text);
        case Json::Array:
            for (const Json& item : v.items) out += (out.empty() ? "" : ",") + written(item);
            return "[" + out + "]";
        case Json::Object:
            for (size_t i = 0; i < v.items.size(); i++)
                out += (i ? "," : "") + json_quote(v.keys[i]) + ":" + written(v.items[i]);
            return "{" + out + "}";
    }
    return out;
}

static bool same(const Json& a, const Json& b) {
    if (a.kind != b.kind || a.is_true != b.is_true || a.text != b.text || a.keys != b.keys ||
        a.items.size() != b.items.size())
        return false;
    if (a.number_value != b.number_value || a.integer_value != b.integer_value) return false;
    for (size_t i = 0; i < a.items.size(); i++)
        if (!same(a.items[i], b.items[i])) return false;
    return true;
}

// What callers ask of a value; each question must end in an answer or an Error.
static void ask(const Json& v, const std::string& where) {
    for (const std::string& key : v.keys) EXPECT(v.find(key));
    refusal([&] { v.integer(where); });
    refusal([&] { v.string("text", where); });
    refusal([&] { v.array(where); });
    for (const std::string& key : v.keys) refusal([&] { v.number(key, where); });
}

void fuzz_one(const std::string& input) {
    const std::string where = "file.json";
    Json value;
    {
        // a digit and its comma take two bytes of text and 112 of memory, and twice that while an array grows
        MemoryLimit limit(input.size(), 8 << 10, 400);
        if (!accepts([&] { value = parse_json(input, where); })) return;
    }
    ask(value, where);
    EXPECT(same(parse_json(written(value), where), value));
    EXPECT(parse_json(json_quote(input), where).text.empty() == input.empty());  // quoting makes any bytes valid
}
