// manifest.cpp: the input as a checkpoint's manifest.json. Unless its first byte is 0, its checksum is made right
// first, so that the rest is read. Names stay in the folder, and an accepted manifest reads the same once it is written
// again.
#include "../../lib/run/checkpoint.h"
#include "fuzz.h"

std::vector<std::string> seeds() {
    const std::string whole = manifest_text(1000,
                                            {{"model.safetensors", 30848, 0xe3069283},
                                             {"config.json", 300, 7},
                                             {"optimizer_00000-of-00002.safetensors", 1, 0}},
                                            "{\"seed\": \"1\", \"x\": [1, 2.5]}");
    const auto before = [](const std::string& text) {
        return text.substr(0, text.size() - manifest_ending("").size());
    };
    return {std::string(1, '\0') + whole, " " + before(whole), " " + before(manifest_text(0, {}, "{}")),
            " " + before(manifest_text(1, {{"../a", 1, 1}}, "{}")),
            " " + before(manifest_text(1, {{"a", 1, 1}, {"a", 1, 1}}, "{}"))};
}

void fuzz_one(const std::string& input) {
    static MemoryFolder folder;
    if (input.empty()) return;
    std::string text = input.substr(1);
    if (input[0] != '\0') text += manifest_ending(text);
    folder.fill("manifest.json", text);
    Manifest manifest;
    {
        MemoryLimit limit(text.size(), 32 << 10, 400);
        if (!accepts([&] { manifest = read_manifest(folder.path); })) return;
    }
    for (const FileRecord& file : manifest.files) {
        EXPECT(!file.name.empty() && file.name != "." && file.name != ".." && file.name.find('/') == std::string::npos);
        EXPECT(folder_of(folder.path + "/" + file.name) == folder.path);
        EXPECT(!accepts([&] { verify_file(folder.path, file); }));  // none of them exists
    }
    EXPECT(accepts([&] { verify_checkpoint(folder.path); }) == manifest.files.empty());
    const Manifest second = parse_manifest(manifest_text(manifest.step, manifest.files, manifest.state_text), "again");
    EXPECT(second.step == manifest.step && second.state_text == manifest.state_text &&
           second.files.size() == manifest.files.size());
    for (size_t i = 0; i < second.files.size(); i++)
        EXPECT(second.files[i].name == manifest.files[i].name && second.files[i].size == manifest.files[i].size &&
               second.files[i].crc32c == manifest.files[i].crc32c);
}
