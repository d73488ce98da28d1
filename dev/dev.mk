# dev.mk: tests, goldens and benchmarks. Included by the Makefile, which knows the compilers and libraries.
#   make test        the tests, six minutes on two cores with the building: built and run side by side
#   make test_long   the others: the CHECK build of the emulator, other machines, faults that take their time, registers
#   make build/cuda_tests               any of the programs below
#   make build/train_nsa_emulated && mpirun -np 2 build/train_nsa_emulated --device cuda ...
#                    the whole program on emulated GPUs, with NCCL's part played over shared memory
#   make crash_test && build/crash_test --kills 300       the long form, some minutes

# The test to learn from: on the CPU, and on the GPU where there is one.
test_nsa: $(BUILD)/test_nsa.o $(APART)
	$(call quiet,LINK)$(if $(GPU_FOUND),$(LINK),$(HOST_LINK)) $(filter %.o,$^) -o $@ \
	    $(if $(GPU_FOUND),$(LIBS),$(HOST_LIBS))
$(BUILD)/test_nsa.o: test_nsa.cu $(BUILD)/command
	$(call quiet,CXX )$(if $(GPU_FOUND),$(COMPILE),$(HOST) -x c++) $(DEPENDS) -c $< -o $@
# Programs of the host.
$(addprefix $(BUILD)/,tests crash_test tour host/train_nsa): %: %.o $(APART)
	$(call quiet,LINK)$(HOST_LINK) $(filter %.o,$^) -o $@ $(HOST_LIBS)

# All tests of the host, by the host compiler: a third of the time that nvcc takes; -O1, since each runs once. Where
# there is a GPU, test_device runs too: the tests that run on the device, and its benchmarks, for dev/gpu_check.sh.
$(BUILD)/tests: $(BUILD)/program_tests.o
$(BUILD)/tests.o: dev/test/tests.cu $(BUILD)/command
	$(call quiet,CXX )$(HOST) -O1 -x c++ $(DEPENDS) -c $< -o $@
# Tests of the program and its data, without the model.
$(BUILD)/program_tests.o: dev/test/program_tests.cpp $(BUILD)/command
	$(call quiet,CXX )$(HOST) -O1 $(DEPENDS) -c $< -o $@
$(BUILD)/test_device: $(BUILD)/test_device.o $(APART)
	$(call quiet,LINK)$(LINK) $(filter %.o,$^) -o $@ $(LIBS)
$(BUILD)/test_device.o: dev/test/tests.cu $(BUILD)/command
	$(call quiet,$(COMPILER))$(COMPILE) $(if $(PORT_LIBS),-O1) -DDEVICE_TESTS_ONLY $(DEPENDS) -c $< -o $@

# ---- The emulator: tests that execute CUDA kernels on the CPU, in the plain and in the CHECK build of cuda_on_cpu.h:
# of the emulator itself, and of the CUDA engine (cuda_tests: every kernel, every operation, whole training steps).
# -O1 takes half of -O2's time to compile, and what it makes runs as fast; but in the CHECK build attention by -O2 would
# take 0.7 of the time.
EMULATOR_FLAGS := -std=c++17 -O1 -g1 -Idev/emulator -DUSE_CUDA -DUSE_NCCL -Wall -Wextra -Wno-unknown-pragmas \
  -fstack-clash-protection -pthread $(if $(WERROR),-Werror)
EMULATOR := $(CXX) $(EMULATOR_FLAGS)
# The CHECK build: compiled for the thread sanitizer but linked without it, since cuda_on_cpu_check.h has the functions
# that g++ calls; clang calls others.
EMULATOR_GXX := $(if $(findstring clang,$(CXX)),g++,$(CXX))
EMULATOR_CHECK := -fsanitize=thread,undefined -fno-sanitize-recover=undefined
EMULATOR_PLAIN_PROGRAMS := $(addprefix $(BUILD)/,emulator_tests planted_faults cuda_tests)
EMULATOR_CHECK_PROGRAMS := $(addprefix $(BUILD)/,emulator_tests_check planted_faults_check cuda_tests_check)
# GPUs of compute capability 8.0 and 12.0, which have other tile shapes: the attention kernels alone.
EMULATOR_OTHER_GPUS := $(BUILD)/attention_tests_80 $(BUILD)/attention_tests_120
EMULATOR_PROGRAMS := $(EMULATOR_PLAIN_PROGRAMS) $(EMULATOR_CHECK_PROGRAMS) $(EMULATOR_OTHER_GPUS)
SHORT_EMULATOR_PROGRAMS := $(EMULATOR_PLAIN_PROGRAMS) $(BUILD)/emulator_tests_check
# Programs with their arguments, each one word of dev/run_tests.sh; without cuda_tests, which takes longest.
SHORT_EMULATOR_TESTS := $(BUILD)/emulator_tests $(BUILD)/emulator_tests_check '$(BUILD)/planted_faults 4'
LONG_EMULATOR_TESTS := $(EMULATOR_OTHER_GPUS:%='% --only attention_kernels_head') '$(BUILD)/planted_faults_check 2'
EMULATED := $(if $(HAVE_MPI),$(BUILD)/train_nsa_emulated)
DEVICE := $(if $(GPU_FOUND),$(BUILD)/test_device)
# The program that the short tests start some 1200 times. Where there is nvcc and no GPU it is one that the host
# compiler makes: it starts in 4 ms, nvcc's in 70, nearly all of them for loading cuBLASLt. The long tests start nvcc's.
TESTED := $(if $(HAVE_CUDA),$(if $(GPU_FOUND),,$(BUILD)/host/))train_nsa

$(EMULATOR_PLAIN_PROGRAMS): $(BUILD)/%: dev/test/emulator/%.cpp $(BUILD)/command
	$(call quiet,CXX )$(EMULATOR) $(SAN_FLAGS) $(DEPENDS) $< -o $@
$(EMULATOR_OTHER_GPUS): $(BUILD)/attention_tests_%: dev/test/emulator/attention_tests.cpp $(BUILD)/command
	$(call quiet,CXX )$(EMULATOR) -DEMULATED_CAPABILITY=$* $(SAN_FLAGS) $(DEPENDS) $< -o $@
$(EMULATOR_CHECK_PROGRAMS): $(BUILD)/%_check: dev/test/emulator/%.cpp $(BUILD)/command
	$(call quiet,CXX )$(EMULATOR_GXX) $(EMULATOR_FLAGS) $(EMULATOR_CHECK) $(DEPENDS) -c $< -o $@.o
	$(call quiet,LINK)$(EMULATOR_GXX) $@.o -fsanitize=undefined -pthread -o $@
# The whole program on up to four emulated GPUs, one for each rank.
$(BUILD)/train_nsa_emulated: train_nsa.cu lib/report/hf/*.py lib/report/html/* $(BUILD)/command
	$(call quiet,CXX )$(EMULATOR) -DEMULATED_GPUS=4 -DUSE_MPI -DOMPI_SKIP_MPICXX -DMPICH_SKIP_MPICXX \
	    $(MPI_FLAGS) $(SAN_FLAGS) $(DEPENDS) -x c++ $< -x none -o $@ $(MPI_LIBS)

$(BUILD)/host/train_nsa.o: train_nsa.cu lib/report/hf/*.py lib/report/html/inspect.html $(BUILD)/command \
  $(BUILD)/version
	$(call quiet,CXX )mkdir -p $(@D) && $(HOST) -x c++ -DPROGRAM_VERSION=$(VERSION) $(DEPENDS) -c $< -o $@

# ---- The tour's numbers, and its figures from them; see dev/tour/figures.py.
.PHONY: figures
figures: train_nsa $(BUILD)/tour $(BUILD)/tour_lanes
	dev/tour/figures.py $(BUILD)
$(BUILD)/tour.o: dev/tour/numbers.cu $(BUILD)/command
	$(call quiet,CXX )$(HOST) -O1 -x c++ $(DEPENDS) -c $< -o $@
$(BUILD)/tour_lanes: dev/tour/lanes.cpp $(BUILD)/command
	$(call quiet,CXX )$(EMULATOR) $(DEPENDS) $< -o $@

# ---- The crash tester, and the shim that makes disks fail; see crash_test.cpp.
CRASH_PROGRAMS := $(BUILD)/crash_test $(BUILD)/faults.so
CRASH_TESTS := '$(BUILD)/crash_test --program $(TESTED) --shim $(BUILD)/faults.so'
.PHONY: crash_test
crash_test: train_nsa $(CRASH_PROGRAMS)
$(BUILD)/crash_test.o: dev/crash_test/crash_test.cpp $(BUILD)/command
	$(call quiet,CXX )$(HOST) -O1 $(DEPENDS) -c $< -o $@
$(BUILD)/faults.so: dev/crash_test/faults.c $(BUILD)/command
	$(call quiet,CC  )$(CC) -shared -fPIC -O1 -Wall -Wextra $(if $(WERROR),-Werror) -pthread $< -o $@ -ldl

# ---- Readers of files on any bytes, by clang's libFuzzer (Debian: clang, libclang-rt-dev) under its sanitizers:
#     make fuzz TARGET=json SECONDS=900        a target of dev/fuzz/fuzz.cpp; status 1 at a finding
# A finding is saved as build/fuzz/TARGET.finding-HASH; FUZZ_TARGET=TARGET build/fuzz/fuzz THAT_FILE shows it again. The
# corpus grows in build/fuzz/TARGET, from seeds that the target itself writes.
.PHONY: fuzz
FUZZ = env TMPDIR=/dev/shm FUZZ_TARGET=$(TARGET) ASAN_OPTIONS=malloc_context_size=1:quarantine_size_mb=2 \
  $(BUILD)/fuzz/fuzz
fuzz: $(BUILD)/fuzz/fuzz
	@mkdir -p $(BUILD)/fuzz/$(TARGET)
	FUZZ_SEEDS=$(BUILD)/fuzz/$(TARGET) $(FUZZ)
	nice $(FUZZ) -timeout=0 -rss_limit_mb=1024 -max_len=4096 -max_total_time=$(or $(SECONDS),900) \
	    -artifact_prefix=$(BUILD)/fuzz/$(TARGET).finding- $(BUILD)/fuzz/$(TARGET)
$(BUILD)/fuzz/fuzz: dev/fuzz/fuzz.cpp $(BUILD)/command
	@mkdir -p $(@D)
	clang++ -std=c++17 -O1 -g -Wno-unknown-pragmas -Wno-pass-failed -fno-omit-frame-pointer \
	    -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined -pthread $(DEPENDS) $< -o $@

.PHONY: test test_long goldens bench hip_check demo
# What takes longest to compile stands first, so that no core waits at the end.
test: $(BUILD)/cuda_tests $(BUILD)/tests $(EMULATED) $(TESTED) test_nsa $(SHORT_EMULATOR_PROGRAMS) \
  $(CRASH_PROGRAMS) $(DEVICE)
	@dev/run_tests.sh '$(BUILD)/cuda_tests --short' $(foreach shard,1/4 2/4 3/4 4/4,'$(BUILD)/tests --short \
	    --program $(TESTED) --shard $(shard)') ./test_nsa $(CRASH_TESTS) $(SHORT_EMULATOR_TESTS) $(DEVICE)
# The longest first, so that no core waits at the end. The shards of the CHECK build take half of the time.
test_long: $(EMULATOR_PROGRAMS) $(BUILD)/tests train_nsa $(EMULATED)
	@dev/run_tests.sh '$(BUILD)/cuda_tests_check --shard 1/2' '$(BUILD)/cuda_tests_check --shard 2/2' \
	    'dev/other_machines_check.sh clang' 'dev/other_machines_check.sh aarch64' '$(BUILD)/tests --long' \
	    dev/opencl_check.sh 'dev/other_machines_check.sh amd' \
	    $(if $(HAVE_CUDA),dev/kernel_report.sh) dev/launcher_check.sh 'dev/test/mutants.sh --sample 2' \
	    '$(BUILD)/cuda_tests --long' $(LONG_EMULATOR_TESTS)
hip_check:
	dev/other_machines_check.sh amd
goldens: train_nsa
	bash dev/test/make_goldens.sh

# From one text to a model of one's own, see dev/demo.sh; TEXT and STEPS are optional.
demo: train_nsa
	@TEXT=$(call quoted,$(value TEXT)) STEPS=$(call quoted,$(STEPS)) OUT='$(BUILD)/demo' dev/demo.sh

# The attention kernels from the plainest to the trainer's: times on a GPU; without one, in emulation, that they agree.
.PHONY: ladder
ladder: $(or $(DEVICE),$(BUILD)/cuda_tests)
	$< $(if $(GPU_FOUND),--ladder,--only ladder_)

# BENCH: arguments of dev/bench/cpu.sh, such as --python VENV/bin/python3
bench: $(BUILD)/bench_cpu
	dev/bench/cpu.sh $(BUILD)/bench_cpu $(BENCH)
$(BUILD)/bench_cpu: dev/bench/bench_cpu.cpp $(BUILD)/command
	$(call quiet,CXX )$(HOST) -UCOMPILED_APART $(DEPENDS) $< -o $@ $(HOST_LIBS)
