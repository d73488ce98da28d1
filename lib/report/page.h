// page.h: a page of html/ with its numbers. Used by report.cpp and inspect.h.
#pragma once
#include <string>

// Any '<' in the JSON could end the script that holds it, or hide its end; as \u003c it is the same JSON.
inline std::string fill_page(std::string page, std::string json) {
    for (size_t at = 0; (at = json.find('<', at)) != std::string::npos;) json.replace(at, 1, "\\u003c");
    const std::string place = "@JSON@";
    return page.replace(page.find(place), place.size(), json);
}
