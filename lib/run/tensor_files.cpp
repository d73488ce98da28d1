// tensor_files.cpp: the functions of tensor_files.h.
#include "tensor_files.h"

void require_finite(const SafeTensors& file) {
    for (const TensorView& t : file.tensors) {
        const float* const values = static_cast<const float*>(t.data);
        const size_t n = size_t(t.bytes / sizeof *values);
        const float* const bad = std::find_if(values, values + n, [](float x) { return !std::isfinite(x); });
        if (t.dtype == "F32" && bad != values + n)
            fail("%s: number %d of %s is %g: the weights are no use; take an earlier checkpoint", file.path,
                 size_t(bad - values), t.name, double(*bad));
    }
}

std::unique_ptr<SafeTensors> open_weights(const std::string& checkpoint, const std::vector<TensorSpec>& specs) {
    auto weights = std::make_unique<SafeTensors>(checkpoint + "/model.safetensors");
    for (const TensorSpec& t : specs) weights->get(t.name, "F32", t.shape());
    require_finite(*weights);
    return weights;
}

// A bitmask becomes a byte per block.
static std::vector<uint8_t> unpack_masks(const std::vector<uint32_t>& masks, size_t words, size_t blocks) {
    const size_t rows = masks.size() / words;
    std::vector<uint8_t> bytes(rows * blocks);
    for (size_t r = 0; r < rows; r++)
        for (size_t j = 0; j < blocks; j++) bytes[r * blocks + j] = is_selected(&masks[r * words], int(j));
    return bytes;
}

void write_state_dump(const std::string& path, StateDump d, const std::string& config, const std::string& command) {
    const int64_t B = d.shape.B, T = d.shape.T, blocks = d.shape.slc_blocks();
    d.tensors.push_back({"inputs", "I32", {B, T}, d.inputs.data(), d.inputs.size() * 4});
    d.tensors.push_back({"targets", "I32", {B, T}, d.targets.data(), d.targets.size() * 4});
    d.tensors.push_back(tensor_view("logits", {B, T, d.V}, d.logits.data()));
    d.tensors.push_back(tensor_view("loss", {1}, &d.loss));
    std::vector<std::vector<uint8_t>> selections;
    for (const auto& masks : d.selection)
        selections.push_back(unpack_masks(masks, size_t(d.shape.selection_words()), size_t(blocks)));
    for (size_t i = 0; i < selections.size(); i++)
        if (!selections[i].empty())
            d.tensors.push_back({format_text("layers.%d.selection", i),
                                 "U8",
                                 {B, d.shape.G, T, blocks},
                                 selections[i].data(),
                                 selections[i].size()});
    write_safetensors(path, {{"config", config}, {"options", command}, {"precision", d.precision}}, d.tensors);
    print("state:  loss %.6f, written to %s; compare it with: python3 dev/reference.py compare %s\n", double(d.loss),
          printable(path), shell_word(path));
}
