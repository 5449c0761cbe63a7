package sandbox

import "os"

// length is the environment variable with the length of a run: empty for `make test`, "matrix" for
// `make matrix`, and any other value for `make proof`.
const length = "UNWIND_TEST_LONG"

// Long reports whether tests run at full length, as in `make proof`.
func Long() bool { return Rounds(0, 0, 1) == 1 }

// Rounds returns its first argument in `make test`, its second in `make matrix`, and its third in
// `make proof`.
func Rounds(test, matrix, proof int) int {
	switch os.Getenv(length) {
	case "":
		return test
	case "matrix":
		return matrix
	}
	return proof
}

// Sampled reports whether a case of a matrix belongs to a sample of 1/oneIn of the cases. indexes
// contains the case's index in each dimension. The sample contains the cases whose indexes add up
// to a multiple of oneIn, so it is spread over all dimensions.
func Sampled(oneIn int, indexes ...int) bool {
	sum := 0
	for _, i := range indexes {
		sum += i
	}
	return sum%oneIn == 0
}
