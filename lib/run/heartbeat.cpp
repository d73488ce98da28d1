// heartbeat.cpp: the functions of heartbeat.h.
#include "heartbeat.h"

void Heartbeat::warn() {
    if (!warned && takes_output(STDERR_FILENO))  // not by complain(), which would wait for whoever holds stdout
        std::fprintf(stderr, "train_nsa: warning: cannot write the heartbeat file %s: %s; training goes on\n",
                     printable(path).c_str(), std::strerror(errno));
    warned = true;
}

void Heartbeat::append(const std::string& line) {
    if (file >= 0 && !error_of([&] { write_all(file, line.data(), line.size(), path); }).empty()) warn();
}

void Heartbeat::step_done(int64_t step, const char* phase, double seconds, double loss) {
    const std::string loss_text = std::isfinite(loss) ? format_text("%.6f", loss) : "null";
    append(format_text(
        "{\"time\":%.3f,\"rank\":%d,\"step\":%lld,\"phase\":\"%s\",\"ms\":%.2f,\"loss\":%s,\"memory_mib\":%.1f}\n",
        unix_time(), rank, (long long)step, phase ? phase : "start", seconds * 1000, loss_text.c_str(),
        resident_bytes() / (1 << 20)));
}

void Heartbeat::waits(int64_t step) {
    const auto at = (long long)step;
    append(format_text("{\"time\":%.3f,\"rank\":%d,\"waiting_in_step\":%lld}\n", unix_time(), rank, at));
}

void Heartbeat::stalls(int64_t step, const std::string& text) {
    append(format_text("{\"time\":%.3f,\"rank\":%d,\"stalled_in_step\":%lld,\"text\":%s}\n", unix_time(), rank,
                       (long long)step, json_quote(text).c_str()));
}

std::string Heartbeat::ranks_behind(int ranks, int64_t step) const {
    const size_t number = path.rfind(std::to_string(rank));
    std::string list;
    int count = 0;
    for (int r = 0; r < ranks && number != std::string::npos; r++) {
        std::string other = path;
        const std::string line = last_line(other.replace(number, std::to_string(rank).size(), std::to_string(r)));
        long long at = -1;
        const size_t waits = line.find("\"waiting_in_step\":"), done = line.find("\"step\":");
        if (waits != std::string::npos) std::sscanf(line.c_str() + waits, "\"waiting_in_step\":%lld", &at);
        else if (done != std::string::npos && std::sscanf(line.c_str() + done, "\"step\":%lld", &at) == 1) at--;
        if (r == rank || line.empty() || at >= step) continue;
        list += (count++ ? ", " : "") + std::to_string(r);
    }
    return count == 0 ? "" : (count == 1 ? "rank " : "ranks ") + list + (count == 1 ? " has" : " have");
}
