// tensorboard.h: TensorBoard's event files, written by hand: records of (length, checksum, an Event protobuf,
// checksum). Used by run_folder.h with --tensorboard 1.
#pragma once
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>

#include "../base/files.h"
#include "../base/errors.h"
#include "../base/clock.h"

// The few pieces of protobuf's wire format that an Event needs. Little endian, as this machine is.
namespace protobuf {
inline std::string varint(uint64_t x) {
    std::string bytes;
    for (; x >= 128; x >>= 7) bytes += char((x & 127) | 128);
    return bytes + char(x);
}
template <class T>
std::string raw(T x) {
    return std::string(reinterpret_cast<const char*>(&x), sizeof x);
}
enum { VARINT = 0, FIXED64 = 1, LENGTH = 2, FIXED32 = 5 };
inline std::string tag(int field, int type) { return varint(uint64_t(field << 3 | type)); }
inline std::string integer(int field, uint64_t x) { return tag(field, VARINT) + varint(x); }
inline std::string real(int field, double x) { return tag(field, FIXED64) + raw(x); }
inline std::string real(int field, float x) { return tag(field, FIXED32) + raw(x); }
inline std::string bytes(int field, const std::string& x) { return tag(field, LENGTH) + varint(x.size()) + x; }
}  // namespace protobuf

class EventFile {
    std::FILE* file;

    // TensorFlow rotates and shifts a checksum that lies beside its own data.
    static uint32_t masked_crc(const std::string& bytes) {
        const uint32_t crc = crc32c(0, bytes.data(), bytes.size());
        return (crc >> 15 | crc << 17) + 0xa282ead8u;
    }
    // tensorflow.Event: 1 wall_time, 2 step, 3 file_version, 5 summary, 7 session_log.
    bool write(const std::string& event) {
        const std::string length = protobuf::raw(uint64_t(event.size()));
        const std::string record =
            length + protobuf::raw(masked_crc(length)) + event + protobuf::raw(masked_crc(event));
        return std::fwrite(record.data(), 1, record.size(), file) == record.size() && std::fflush(file) == 0;
    }

  public:
    // A file of its own for each start of the program, named as TensorBoard expects it. first_step: the next one. Where
    // an earlier file of the run has gone beyond it, TensorBoard forgets what that said (SessionLog.START).
    EventFile(const std::string& folder, int64_t first_step) {
        char host[256] = "host";
        gethostname(host, sizeof host - 1);
        const double now = unix_time();
        const std::string path = format_text("%s/events.out.tfevents.%010.0f.%s.%d", folder, now, host, int(getpid()));
        file = std::fopen(path.c_str(), "wxe");
        if (!file) fail("cannot create %s: %s", path, std::strerror(errno));
        const std::string start = protobuf::integer(1, 1);
        write(protobuf::real(1, now) + protobuf::bytes(3, "brain.Event:2"));
        write(protobuf::real(1, now) + protobuf::integer(2, uint64_t(first_step)) + protobuf::bytes(7, start));
    }
    EventFile(const EventFile&) = delete;
    EventFile& operator=(const EventFile&) = delete;
    ~EventFile() { std::fclose(file); }

    // Summary: 1 value, of which 1 tag, 2 simple_value. False where the disk is full.
    bool add(double time, int64_t step, const std::vector<std::pair<std::string, double>>& scalars) {
        std::string summary;
        for (const auto& [name, value] : scalars)
            summary += protobuf::bytes(1, protobuf::bytes(1, name) + protobuf::real(2, float(value)));
        return write(protobuf::real(1, time) + protobuf::integer(2, uint64_t(step)) + protobuf::bytes(5, summary));
    }
};
