# crash_test.mk: builds the crash tester and the shim that makes disks fail; see crash_test.cpp. Included by the
# Makefile.
#   make crash_test && build/crash_test --kills 300       the long form, some minutes
CRASH_PROGRAMS = $(BUILD)/crash_test $(BUILD)/faults.so
CRASH_TESTS = '$(BUILD)/crash_test --shim $(BUILD)/faults.so'

.PHONY: crash_test
crash_test: train_nsa $(CRASH_PROGRAMS)
$(BUILD)/crash_test: dev/crash_test/crash_test.cpp lib/checkpoint.h lib/safetensors.h lib/files.h lib/json.h lib/util.h
	@mkdir -p $(BUILD)
	$(CXX) -std=c++17 -O1 -Wall -Wextra $(if $(WERROR),-Werror) -pthread $(SAN_FLAGS) $< -o $@
$(BUILD)/faults.so: dev/crash_test/faults.c
	@mkdir -p $(BUILD)
	$(CC) -shared -fPIC -O1 -Wall -Wextra $(if $(WERROR),-Werror) -pthread $< -o $@ -ldl
