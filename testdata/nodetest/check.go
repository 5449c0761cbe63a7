package nodetest

// Check ends a test that has an error. t is a testing.TB, or rapid's.
func Check(t interface {
	Helper()
	Fatal(args ...any)
}, err error,
) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
