// clock.h: seconds, and the time of day.
#pragma once
#include <chrono>
#include <ctime>
#include <string>

// Seconds on a clock that never goes back.
inline double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
// Seconds since 1970, for logs.
inline double unix_time() {
    return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}
// The date and time of day in Greenwich, in a format of strftime.
inline std::string utc_text(const char* format, double time) {
    const time_t seconds = time_t(time);
    struct tm parts;
    char text[64];
    return gmtime_r(&seconds, &parts) && std::strftime(text, sizeof text, format, &parts) ? text : "?";
}
