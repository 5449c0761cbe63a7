package nodetest

// Check fails the test immediately if err is not nil. t is a testing.TB or a *rapid.T.
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
