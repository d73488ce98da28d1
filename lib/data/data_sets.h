// data_sets.h: several sources of tokens in one option: their patterns, names and weights, and whose turn it is when
// they are mixed. Takes plain values; used by dataloader.h.
#pragma once
#include <algorithm>
#include <cctype>
#include <cstring>
#include <filesystem>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "shards.h"
#include "../base/errors.h"

struct DataSet {
    std::string pattern;  // for glob_files(), or "synthetic"
    uint64_t weight = 1;
    std::string name;  // "": none was given
};

// A backslash takes the meaning from the character behind it, here as in a pattern.
inline std::vector<size_t> places_of(char wanted, const std::string& text) {
    std::vector<size_t> places;
    for (size_t i = 0; i < text.size(); i++) {
        if (text[i] == wanted) places.push_back(i);
        if (text[i] == '\\') i++;
    }
    return places;
}

// What the commas separate.
inline std::vector<std::string> set_texts(const std::string& text) {
    std::vector<size_t> ends = places_of(',', text);
    ends.push_back(text.size());
    std::vector<std::string> sets;
    size_t begin = 0;
    for (const size_t end : ends) {
        sets.push_back(text.substr(begin, end - begin));
        begin = end + 1;
    }
    return sets;
}

// The sets of --data: PATTERN:WEIGHT,PATTERN:WEIGHT,... A set without a weight has 1.
inline std::vector<DataSet> weighted_sets(const std::string& text, const char* option) {
    constexpr int MOST = 10000;
    const std::vector<std::string> texts = set_texts(text);
    std::vector<DataSet> sets;
    for (const std::string& of_set : texts) {
        DataSet set = {of_set, 1, ""};
        const std::vector<size_t> colons = places_of(':', set.pattern);
        if (!colons.empty()) {
            const std::string weight = set.pattern.substr(colons.back() + 1);
            const bool digits =
                !weight.empty() && weight.size() < 9 && weight.find_first_not_of("0123456789") == std::string::npos;
            set.weight = digits ? std::stoull(weight) : 0;
            if (set.weight < 1 || set.weight > MOST)
                fail_usage(
                    "%s '%s': '%s' is no weight, expected an integer in 1..%d; a : or , that belongs to a path needs "
                    "a \\ before it",
                    option, text, weight, MOST);
            set.pattern.resize(colons.back());
        }
        if (set.pattern.empty() || (set.pattern == "synthetic" && texts.size() > 1))
            fail_usage("%s '%s': %s", option, text,
                       set.pattern.empty() ? "a pattern is empty" : "the synthetic corpus cannot be mixed");
        sets.push_back(set);
    }
    uint64_t divisor = 0;
    for (const DataSet& set : sets) divisor = std::gcd(divisor, set.weight);
    for (DataSet& set : sets) set.weight /= divisor;
    return sets;
}

inline bool is_set_name(const std::string& name) {
    return !name.empty() && name.size() <= 32 && std::all_of(name.begin(), name.end(), [](char c) {
        return std::isalnum(static_cast<unsigned char>(c)) || std::strchr("_-.", c);
    });
}

// The sets of --val-data: NAME=PATTERN,NAME=PATTERN,... A single one may do without a name.
inline std::vector<DataSet> named_sets(const std::string& text, const char* option) {
    std::vector<DataSet> sets;
    for (const std::string& of_set : set_texts(text)) {
        const std::vector<size_t> equals = places_of('=', of_set);
        const size_t end = equals.empty() ? 0 : equals[0], begin = equals.empty() ? 0 : end + 1;
        const DataSet set = {of_set.substr(begin), 1, of_set.substr(0, end)};
        if (begin && !is_set_name(set.name))
            fail_usage(
                "%s '%s': '%s' is no name, expected at most 32 letters, digits, _ - and .; a = or , that belongs to a "
                "path needs a \\ before it",
                option, text, set.name);
        if (set.pattern.empty()) fail_usage("%s '%s': a pattern is empty", option, text);
        for (const DataSet& other : sets)
            if (other.name == set.name && begin)
                fail_usage("%s '%s': the name '%s' is there twice", option, text, set.name);
        sets.push_back(set);
    }
    for (const DataSet& set : sets)
        if (sets.size() > 1 && set.name.empty())
            fail_usage("%s '%s': '%s' has no name; of several sets each needs one, as in 'web=%s,...'", option, text,
                       set.pattern, set.pattern);
    return sets;
}

// The files of each set, in which no file is twice, by a link or another path either: its samples would count twice.
inline std::vector<std::vector<std::string>> files_of(const std::vector<DataSet>& sets, const char* option) {
    std::vector<std::vector<std::string>> files;
    struct Seen {
        std::string file, pattern;
    };
    std::map<FileIdentity, Seen> seen;
    for (const DataSet& set : sets) {
        files.push_back(shard_files(set.pattern, option));
        for (const std::string& file : files.back()) {
            const auto [same, is_new] = seen.emplace(file_identity(file), Seen{file, set.pattern});
            const auto& [other, pattern] = same->second;
            if (is_new) continue;
            if (other != file)
                fail_usage("%s: %s is the same file as %s: its samples would count twice; leave one of them out",
                           option, file, other);
            fail_usage("%s: %s matches both '%s' and '%s': which weight it has would be unclear", option, file, pattern,
                       set.pattern);
        }
    }
    return files;
}

// The same sets with patterns from the root, so that a later command finds the files from wherever it is started.
inline std::string with_absolute_patterns(const std::string& text, bool named) {
    const std::string here = glob_literal(std::filesystem::current_path().string(), SPECIAL_IN_SETS);
    std::string all;
    for (const std::string& set : set_texts(text)) {
        const std::vector<size_t> equals = places_of('=', set);
        const size_t begin = named && !equals.empty() ? equals[0] + 1 : 0;
        const std::string pattern = set.substr(begin);
        all += "," + set.substr(0, begin);
        if (pattern == "synthetic") all += pattern;
        else all += absolute_path(pattern, here);
    }
    return all.substr(1);
}

// Whose turn it is. Sets have weights w, and W is their sum: of each W samples in a row that begin at a multiple of W,
// exactly w are of each set, spread evenly. A set deals its own samples by its own epochs, all of them before one comes
// again. So any place is known by its number, and a mixture adds nothing to a loader's state.
class Mixture {
    std::vector<uint64_t> samples, weights, first;
    struct Turn {
        size_t set;
        uint64_t before;  // turns of this set before this one
    };
    std::vector<Turn> round;  // (W)

  public:
    struct Place {
        size_t set;
        uint64_t first, samples;   // of the set; `first` counts over all sets
        uint64_t epoch, position;  // of the set
    };

    // The numbers of samples and the weights of the sets; none is 0.
    Mixture(std::vector<uint64_t> set_samples, std::vector<uint64_t> set_weights)
        : samples(std::move(set_samples)), weights(std::move(set_weights)), first(samples.size()) {
        for (size_t set = 1; set < samples.size(); set++) first[set] = first[set - 1] + samples[set - 1];
        for (size_t set = 0; set < samples.size(); set++)
            for (uint64_t before = 0; before < weights[set]; before++) round.push_back({set, before});
        // Turn k of a set is due at (k + 1/2) / w of the round; the first set goes first where two are due.
        std::stable_sort(round.begin(), round.end(), [&](const Turn& a, const Turn& b) {
            return (2 * a.before + 1) * weights[b.set] < (2 * b.before + 1) * weights[a.set];
        });
    }

    Place at(uint64_t number) const {
        const Turn& turn = round[number % round.size()];
        const uint64_t of_set = number / round.size() * weights[turn.set] + turn.before, n = samples[turn.set];
        return {turn.set, first[turn.set], n, of_set / n, of_set % n};
    }

    // How many samples of the mixture come before this set begins its second epoch.
    uint64_t first_epoch(size_t set) const {
        const uint64_t n = samples[set], w = weights[set];
        const auto again =
            std::find_if(round.begin(), round.end(), [&](const Turn& t) { return t.set == set && t.before == n % w; });
        return n / w * round.size() + uint64_t(again - round.begin());
    }

    // How many samples come before any comes again.
    uint64_t first_epoch() const {
        uint64_t least = std::numeric_limits<uint64_t>::max();
        for (size_t set = 0; set < samples.size(); set++) least = std::min(least, first_epoch(set));
        return least;
    }

    size_t turns() const { return round.size(); }
};

// What has changed from one list of shards to another, in words; "" if nothing has.
inline std::string changed_shards(const std::vector<std::string>& then, const std::vector<std::string>& now) {
    const auto without = [](const std::vector<std::string>& these, std::vector<std::string> those) {
        std::vector<std::string> rest;
        std::sort(those.begin(), those.end());
        for (const std::string& name : these)
            if (!std::binary_search(those.begin(), those.end(), name)) rest.push_back(name);
        return rest;
    };
    const auto words = [](const std::vector<std::string>& names, const char* what) {
        if (names.empty()) return std::string();
        std::string text = format_text("%d shard%s %s (%s", names.size(), names.size() == 1 ? "" : "s", what, names[0]);
        if (names.size() > 1) text += (names.size() > 2 ? " to " : ", ") + names.back();
        return text + ")";
    };
    const std::string more = words(without(now, then), "added"), fewer = words(without(then, now), "gone");
    return more + (more.empty() || fewer.empty() ? "" : ", ") + fewer;
}

// ---------------------------------------------------------------------------------------------------------------------
// What a loader of these sets is told, and where it stands.

struct LoaderState {
    uint64_t seed;         // of the shuffle
    uint64_t seq_len;      // T: samples are cut by it
    uint64_t corpus;       // see DataLoader::fingerprint
    uint64_t next_sample;  // its global number: the same on every rank, and on any number of ranks
};

struct LoaderOptions {
    std::string name = "--data";  // the option that gave the tokens, for messages
    int seq_len = 0;              // T
    int vocab_size = 0;           // of the model's tokenizer
    uint32_t vocab_digest = 0;    // the same; 0: not known
    uint64_t seed = 0;
    bool shuffle = true;
    bool tail = false;  // the last sample of a shard may be shorter, so that every token but the first is a target
    int rank = 0, world_size = 1;
    std::vector<DataSet> sets = {{}};  // TokenSource::set counts them
};
